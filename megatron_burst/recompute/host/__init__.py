"""Host memory as a tier: what backward needs waits there and is fetched one layer ahead."""
