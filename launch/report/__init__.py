"""One page of figures of one or several runs."""
