"""One process a site: its own records, keys and identity. Being written; see the manual's page."""
