"""A Model Context Protocol server over the verbs, for assistants: `threefold mcp`."""
