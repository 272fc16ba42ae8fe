from tests.e2e.command import launched as launched
