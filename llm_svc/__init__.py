"""The language service: tokens and visual tokens in, tokens out; knows no image bytes and no replica."""
