#!/usr/bin/env bash
# Make links to files of the checkout absolute, in place: absolute_links.sh REPOSITORY VERSION FILE. An image gets the
# address of the file itself, any other link that of the page that shows it.
set -euo pipefail
sed -i.old -E \
    -e "s#(!\[[^]]*\]\()([A-Za-z][^):]*)\)#\1$1/raw/v$2/\2)#g" \
    -e "s#(\]\()([A-Za-z][^):]*)\)#\1$1/blob/v$2/\2)#g" \
    "$3"
rm "$3.old"
