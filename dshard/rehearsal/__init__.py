"""Rehearsed modules."""
