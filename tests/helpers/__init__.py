"""What tests share: models, samples of operators, cases, and ways to compare with one device."""
