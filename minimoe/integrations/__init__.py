"""minimoe as a part of other people's programs; each needs a package of its own, named in pyproject.toml."""
