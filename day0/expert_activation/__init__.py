"""Which experts the tokens of real prompts take, layer by layer, text and pictures apart."""
