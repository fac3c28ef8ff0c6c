"""The papers' synthetic tasks: generators (`tasks/`, a file a task), data, accuracy, suites."""
