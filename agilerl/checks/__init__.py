"""Whether what was given is what was asked for: arguments, settings as sentences, and no secrets in either."""
