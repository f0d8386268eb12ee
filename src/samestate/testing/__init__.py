"""samestate in other people's test suites: fixtures and a mark for pytest."""
