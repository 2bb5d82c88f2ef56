"""The same flat model, exported to Promela and searched by SPIN: a second opinion that shares no search with ours."""
