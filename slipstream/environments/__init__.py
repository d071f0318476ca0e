"""Built-in environments (sort_digits, dataset) and what carries any environment: episodes, client, server."""
