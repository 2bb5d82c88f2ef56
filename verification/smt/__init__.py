"""What solvers are asked: induction, bounded search, ranking. The only package that knows z3 and cvc5."""
