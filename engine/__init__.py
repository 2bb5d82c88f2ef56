"""The prefill/decode engine: pure cores driven by the compiled spec, and the shells around them."""
