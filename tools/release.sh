#!/usr/bin/env bash
# Make the files of a release and try them; uploading them is a step of its own, which the last line names.
#
#   tools/release.sh REPOSITORY OUT [PIP-OPTION ...]
#
# REPOSITORY is the address that the package is published from, such as https://github.com/NAME/agilerl: the project's links
# are made of it, and the README's links, which lead to files of the checkout, are made absolute. OUT is a new folder for
# the wheel and the source distribution. Options go to pip when the wheel is tried, for instance --extra-index-url.
# Needs what git has committed and nothing else; PYTHON names the interpreter.
set -euo pipefail

if [[ $# -lt 2 || ! $1 =~ ^https://[^/]+/.+ ]]; then
    echo "expected an https address and a folder, found '$*'; run: tools/release.sh https://HOST/NAME/agilerl dist" >&2
    exit 2
fi
repository=${1%/} out=$2
shift 2
if [[ -e $out ]]; then
    echo "$out exists already; remove it, or name another folder" >&2
    exit 2
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git -C "$root" archive HEAD | tar -x -C "$work" --one-top-level=source

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$work/source/pyproject.toml")
for file in agilerl/__init__.py CITATION.cff CHANGELOG.md; do
    grep -qF "$version" "$work/source/$file" || { echo "$file does not have version $version" >&2; exit 1; }
done

cat >> "$work/source/pyproject.toml" <<END

[project.urls]
Homepage = "$repository"
Documentation = "$repository/tree/main/docs"
Changelog = "$repository/blob/main/CHANGELOG.md"
Issues = "$repository/issues"
END
"$root/tools/absolute_links.sh" "$repository" "$version" "$work/source/README.md"

"${PYTHON:-python3}" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet build twine
"$work/tools/bin/python" -m build --outdir "$work/made" "$work/source" > "$work/log" || { cat "$work/log" >&2; exit 1; }
"$work/tools/bin/python" -m twine check --strict "$work"/made/*

# Installed from the wheel, away from the checkout: the main job's checks, a report, what the package says of itself.
"${PYTHON:-python3}" -m venv "$work/trial"
"$work/trial/bin/python" -m pip install --quiet --constraint "$root/constraints.txt" "$@" "$work"/made/*.whl
cd "$work"
"$work/trial/bin/agilerl" env
"$work/trial/bin/agilerl" train training.max_steps=2048 environment.test_prompts=20 --out run
"$work/trial/bin/agilerl" report run

cd "$root"
mkdir -p "$out"
cp "$work"/made/* "$out"/
ls -l "$out"
echo "To publish version $version: git tag v$version, push it, then: python -m twine upload $out/*"
