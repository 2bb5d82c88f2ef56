"""The paged KV cache: who owns which page (integers), and where its bytes lie (torch)."""
