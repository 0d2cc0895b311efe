"""The command line: it parses, shows and exits. Each command imports only what it needs."""
