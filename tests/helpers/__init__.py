"""Helpers that tests share: models, samples of operators, cases, and comparisons with one device."""
