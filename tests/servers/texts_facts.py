"""Print how pieces of a text are written for a server that takes only text: python texts_facts.py FOLDER TEXT"""

import json
import random
import sys
from pathlib import Path

from quantmill.client.text_prompts import Texts

PIECES = 400


def main() -> None:
    folder, file = map(Path, sys.argv[1:])
    texts, chosen = Texts(folder), random.Random(0)
    text = file.read_text(encoding="utf-8")
    ids = texts.encode(text)
    whole = texts.text(ids[:20])
    begins, exact = len(texts.reread), whole == texts.decode(ids[:20])
    lengths = [chosen.choice((8, 44, 128)) for _ in range(PIECES)]
    places = [chosen.randrange(1, len(ids) - length) for length in lengths]
    pieces = [ids[place : place + length] for place, length in zip(places, lengths, strict=True)]
    counts = [len(texts.encode(texts.text(piece))) for piece in pieces]
    print(json.dumps({"begins": begins, "exact": exact, "lengths": lengths, "counts": counts}))


if __name__ == "__main__":
    main()
