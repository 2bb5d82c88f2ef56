"""The z3 reading, and induction over any number of chunks. The only package that knows z3."""
