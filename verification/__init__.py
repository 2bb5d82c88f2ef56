"""Questions put to the spec: explicit search, induction, negative controls. Imports rlt_fsm only."""
