"""Modules that tests share: small models, data and runs, and checks. Tests import each module by its full name."""
