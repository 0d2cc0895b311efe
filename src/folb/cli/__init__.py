"""The command line: it parses, shows and exits. Only what a command needs is imported."""
