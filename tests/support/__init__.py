"""What tests share: small models, data, runs, refusals. Tests import these modules by their full name."""
