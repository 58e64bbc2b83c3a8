"""Which keys survive eviction, and the shadow mask that records it. Imports nothing of the other packages."""
