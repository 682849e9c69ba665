"""The mutation run: small changes that nobody thought of, made by rules, and which of them no check sees."""
