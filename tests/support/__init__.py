"""What several test modules share: fixtures, child processes, servers, pages."""
