"""Layers of experts: one operator, its loops, and the exchange that sends only the tokens that are needed."""
