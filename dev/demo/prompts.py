"""Prompts of the demonstration: four domains, made from templates of our own, the same for every run.

Three domains are trained and evaluated; `letters` is only evaluated, and tells what the drafter is worth on
requests that it was not trained for.
"""

import random
from collections.abc import Callable, Iterator
from itertools import product

NAMES = ("Ada", "Bruno", "Chidi", "Dalia", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kiran", "Lena")
GOODS = ("apples", "books", "tickets", "pencils", "cups", "stickers", "tiles", "candles", "eggs", "postcards")
PLACES = ("a market", "a school", "a library", "a farm", "a bakery", "a small shop", "a museum", "a garden")

_MATHS = (
    "{a} buys {x} {g} for {y} dollars each and sells them for {z} dollars each. How much does {a} earn?",
    "{a} has {x} {g}. {b} has {y} more than {a}. How many {g} do they have together?",
    "At {p}, {x} boxes hold {y} {g} each. {z} {g} are broken. How many are left?",
    "{a} walks {x} km every day for {y} days and then rests. How far did {a} walk in all?",
    "{a} saves {x} dollars a week. After {y} weeks {a} spends {z} dollars. How much is left?",
    "A train goes {x} km in one hour. How far does it go in {y} hours and {z} minutes?",
    "{a} shares {x} {g} equally among {y} friends. How many does each friend get, and how many remain?",
    "{a} reads {x} pages a day. A book has {y} pages more than {z} hundred. How many days does the book take?",
    "A rectangle is {x} cm long and {y} cm wide. What are its area and its perimeter?",
    "{a} and {b} pick {x} and {y} {g} at {p}. They give away {z}. How many do they keep?",
)

_TASKS = (
    "returns the sum of the even numbers in a list",
    "counts the vowels in a string",
    "reverses the words of a sentence",
    "checks whether a number is prime",
    "returns the largest element of a list",
    "computes the factorial of a number",
    "removes duplicates from a list",
    "checks whether a string is a palindrome",
    "merges two sorted lists",
    "returns the n-th Fibonacci number",
    "converts Celsius to Fahrenheit",
    "counts how often each word occurs in a text",
    "finds the common elements of two lists",
    "returns the average of a list of numbers",
    "flattens a nested list",
    "checks whether two strings are anagrams",
    "finds the longest word in a sentence",
    "multiplies two matrices",
    "reads a file and counts its lines",
    "sorts a list of dictionaries by a key",
    "computes the greatest common divisor of two numbers",
    "turns a list of pairs into a dictionary",
    "returns the second smallest number of a list",
    "capitalises the first letter of every word",
    "finds the index of a value by binary search",
    "rotates a list by k places",
    "counts the digits of a number",
    "checks whether a year is a leap year",
    "returns the sum of the digits of a number",
    "splits a list into chunks of a given size",
)
_CODE = (
    "Write a Python function that {t}.",
    "Write a Python function that {t}. Add a docstring.",
    "Write a Python function that {t} and show how to call it.",
    "Show me Python code that {t}.",
    "Write a short Python program that {t}, with an example.",
    "Using a loop, write a Python function that {t}.",
    "Define a function in Python that {t}. Explain it in one sentence.",
)

_TOPICS = (
    "photosynthesis", "the water cycle", "volcanoes", "the printing press", "compound interest", "the human heart",
    "black holes", "renewable energy", "vaccines", "the Roman Empire", "coral reefs", "the moon", "gravity",
    "machine learning", "healthy sleep", "recycling", "bees", "electric cars", "the Industrial Revolution", "rivers",
    "jazz music", "chess", "the internet", "bread", "glaciers", "democracy", "earthquakes", "batteries", "whales",
    "the solar system", "deserts", "magnets", "libraries", "time zones", "rainbows", "forests", "tea", "bridges",
)  # fmt: skip
_GENERAL = (
    "Explain {t} in simple terms.",
    "What are the main facts about {t}?",
    "Give me three tips about {t} for a beginner.",
    "Why should we know about {t}?",
    "List four interesting facts about {t}.",
    "Write a short paragraph about {t}.",
    "How would you explain {t} to a ten year old child?",
)

_EVENTS = (
    "a birthday party", "a team meeting", "a school concert", "a job interview", "a picnic in the park",
    "a visit to the dentist", "a chess club evening", "a garden sale", "a film night", "a farewell lunch",
)  # fmt: skip
_LETTERS = (
    "Write an email to {a} that moves {e} to next week.",
    "Write a short letter that invites {a} to {e}.",
    "Write a polite message that tells {a} that you cannot come to {e}.",
    "Write a thank-you note to {a} after {e}.",
)


def _maths(rng: random.Random) -> Iterator[str]:
    while True:
        a, b = rng.sample(NAMES, 2)
        numbers = {"x": rng.randint(3, 60), "y": rng.randint(2, 12), "z": rng.randint(2, 9)}
        yield rng.choice(_MATHS).format(a=a, b=b, g=rng.choice(GOODS), p=rng.choice(PLACES), **numbers)


def _crossed(templates: tuple[str, ...], **words: tuple[str, ...]) -> Callable[[random.Random], Iterator[str]]:
    def prompts(rng: random.Random) -> Iterator[str]:
        crossed = [
            template.format(**dict(zip(words, chosen, strict=True)))
            for template, *chosen in product(templates, *words.values())
        ]
        rng.shuffle(crossed)
        yield from crossed

    return prompts


DOMAINS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "maths": _maths,
    "code": _crossed(_CODE, t=_TASKS),
    "general": _crossed(_GENERAL, t=_TOPICS),
    "letters": _crossed(_LETTERS, a=NAMES, e=_EVENTS),
}
"""Each domain's endless or shuffled prompts, some of them more than once."""


def prompts(domain: str, count: int, *, seed: int = 0) -> list[str]:
    """Return `count` different prompts of a domain, the same ones for the same seed.

    Raises:
        ValueError: the domain's templates do not give so many.
    """
    found: dict[str, None] = {}
    for prompt in DOMAINS[domain](random.Random(f"{seed}/{domain}")):
        found[prompt] = None
        if len(found) == count:
            return list(found)
    raise ValueError(f"{domain} has only {len(found)} prompts; asked for {count}")
