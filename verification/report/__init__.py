"""What people and CI see of a verification run: a page, JUnit, SARIF, ITF traces, coverage, and docs/proof.md."""
