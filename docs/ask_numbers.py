"""Ask a server for the planted numbers of the documents suite (docs/serving.md).

`python docs/ask_numbers.py URL MODEL TOKENIZER [PROMPTS]`: the server's address, the name that it
serves, and the model whose tokens measure the texts. Prints how many of 20 replies, or of so many,
contain the number.
"""

import json
import sys
from urllib.request import Request, urlopen

from mmkv.eval.arguments import token_counter
from mmkv.eval.scoring import contains
from mmkv.eval.suites.registry import load_suite


def asked(url: str, model: str, prompt: str, tokens: int) -> str:
    """Return a chat's greedy reply."""
    message = {"role": "user", "content": prompt}
    body = {"model": model, "messages": [message], "temperature": 0, "max_tokens": tokens}
    header = {"Content-Type": "application/json"}
    request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), header)
    with urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def main(url: str, model: str, name: str, prompts: int = 20) -> None:
    """Ask all questions, one after another."""
    count = token_counter(name)
    samples = load_suite("documents", "novels", tasks=["needle"], limit=prompts, count=count)
    right = 0
    for sample in samples:
        reply = asked(url, model, sample.prompt, sample.max_new_tokens)
        found = contains(reply, sample.answers[0])
        right += found > 0
        print(sample.id, sample.answers[0], repr(reply))
    print(f"{right} of {len(samples)} right")


if __name__ == "__main__":
    url, model, name, *prompts = sys.argv[1:]
    main(url, model, name, *map(int, prompts))
