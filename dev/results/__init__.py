"""The paper's claims, small and honest: `make results`."""
