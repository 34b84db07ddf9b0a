"""Print the text that an engine writes after a prompt, by its ids or its text: python served_text.py ENGINE ARTIFACT"""

import json
import sys
from pathlib import Path

from attached_facts import NEW, PROMPT

from quantmill import engines
from quantmill.client.text_prompts import Texts


def main() -> None:
    name, artifact = sys.argv[1], Path(sys.argv[2])
    engine = engines.load(name, artifact, "cpu", 1)
    ids = [token for _, token, _ in engine.decode([PROMPT], NEW)]
    text = Texts(artifact).decode(ids) if engine.text is None else engine.text
    engine.close()
    print(json.dumps([len(ids), text]))


if __name__ == "__main__":
    main()
