"""A file here is a task, and its name is its `task:` in a config file. Nothing lists them."""
