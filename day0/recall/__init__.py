"""How much of dense attention the indexer's choice keeps, by layer and length."""
