"""The fixed text the tiny checkpoint's tokenizer is trained on; our own words, no data set."""

from __future__ import annotations

CORPUS = """\
The service takes a question and a picture and gives back an answer, one token at a time.
What is the capital of France? The capital of France is Paris. What is the colour of the sky? The sky is blue.
Describe the image. The image shows a small house near a lake, with a mountain behind it and the sun above.
Compare the first picture with the second picture. The first one is red, the second one is blue.
How many birds are in the photograph? There are three birds over the water and one on the roof of the house.
Write a short story about a fox that learned to read. Once upon a time there was a fox who lived in the forest.
Please count from one to ten: one, two, three, four, five, six, seven, eight, nine, ten.
You are a helpful assistant. Answer in one sentence, and say so when you do not know the answer.
In the morning the light comes through the window and falls on the table where the letters are.
A model reads the text from left to right, and looks back at what it has read before.
Some layers keep a small state that is updated with every token; other layers choose where to look.
The river runs down from the mountain to the sea, past the old mill and under the stone bridge.
She asked him whether the train had left, and he said that it would leave in a quarter of an hour.
They walked along the shore until the evening, when the wind turned and the first stars came out.
Numbers such as 0, 1, 2, 10, 100, 2026 and 3.14 are common in text, as are (brackets), "quotes" and - dashes.
def add(first: int, second: int) -> int: return first + second
for index in range(10): print(index, index * index)
{"name": "day0", "kind": "service", "ports": [50051, 50052, 9090], "ready": true}
Où est la bibliothèque? Elle est à côté de l'école. Ďábel sedí na střeše. Größe und Übermaß.
世界 你好 世界。你好,世界! こんにちは世界。 Привет, мир! Γειά σου κόσμε.
👋 🙂 🙂 👩‍👩‍👧 🌍
"""
