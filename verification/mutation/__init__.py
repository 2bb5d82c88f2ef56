"""Mutation of the spec: every part of it is shown to matter, or shown not to."""
