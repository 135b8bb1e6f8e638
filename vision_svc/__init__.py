"""The vision service: images in, visual tokens out; knows nothing of prompts, text or the language model."""
