"""The questions that the bundled tiny checkpoint is trained to answer, each with its only right answer.

Training draws from here and so do the tests, which ask for examples that training never saw: `is_held_out` keeps a
tenth of all pairs of operands, lists and words apart. Only the standard library is imported.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

INTRODUCTION = (
    "I am nanoinfer's tiny demonstration model. I can add and subtract small numbers, sort and reverse short lists, "
    "count, spell words backwards and list primes up to 100. I am very small, so please expect nothing else."
)

WORDS = """
    able above acorn actor again agent alarm album alley amber angel ankle apple apron arrow attic autumn baby bacon
    badge baker banana barn basket beach beard bell bench berry bike bird blanket blue board boat bottle branch bread
    breeze brick bridge bright brother brown brush bubble bucket butter button cabin cable cactus cake camel camera
    candle candy canoe carbon carpet carrot castle cat cellar chair chalk cheese cherry chicken chimney circle city clay
    cliff clock cloud clover coat coffee coin comet copper coral corn cotton couch country cousin crab cradle crane
    crayon cream cricket crown cup curtain daisy dance dawn deer desert desk diamond dinner doctor dog dolphin donkey
    door dragon drawer dream dress drum duck dust eagle earth east echo elbow elephant engine evening fabric falcon
    family farmer father feather fence fern field finger fire fish flag flame flour flower flute forest fork fossil fox
    friend frog fruit garden garlic gate ghost giant ginger giraffe glass globe glove goat gold goose grape grass green
    guitar hammer hand harbor harvest hat hazel heart hello hill hockey honey horse hotel house ice ink iron island
    ivory jacket jam jelly jewel jungle kettle key king kitchen kite kitten knee knife ladder lake lamp lantern laptop
    lawn leaf leather lemon letter library light lily linen lion lizard lunch magnet mango map maple marble market
    meadow melon metal middle milk mirror monkey month moon morning mother motor mountain mouse museum music napkin
    needle nest night north novel number nurse oak ocean office olive onion orange orchard otter oven owl oyster paint
    palace panda paper parrot path peach peanut pear pebble pencil penguin pepper piano picture pillow pilot pine planet
    plate pocket poem pond potato powder prince pumpkin puppet purple puzzle queen quiet quilt rabbit radio rain raven
    ribbon rice ring river road robin robot rocket roof root rope rose ruby sailor salad salt sand school scissors
    season shadow sheep shell ship shirt shoe shovel silver sister sky sleep slow smoke snail snow soap sock soup south
    spark spider spoon spring square squirrel stable star station stone storm story street sugar summer sun swan sweater
    table tailor teacher temple thread thunder ticket tiger timber toast tomato tower train travel tree trumpet tunnel
    turtle uncle valley velvet village violin walnut water whale wheel window winter wolf wood world yellow
""".split()  # noqa: SIM905 - a list literal would take a line for each word

QUESTIONS = {
    "sum": (
        "What is {a} + {b}?|What is {a}+{b}?|What's {a} + {b}?|{a} + {b} =|{a}+{b}=|{a} + {b}|Calculate {a} + {b}.|"
        "Compute {a} + {b}.|How much is {a} + {b}?|What is {a} plus {b}?|Add {a} and {b}."
    ),
    "difference": (
        "What is {a} - {b}?|What is {a}-{b}?|What's {a} - {b}?|{a} - {b} =|{a}-{b}=|{a} - {b}|Calculate {a} - {b}.|"
        "Compute {a} - {b}.|How much is {a} - {b}?|What is {a} minus {b}?|Subtract {b} from {a}."
    ),
    "sort": (
        "Sort {items}.|Sort the numbers {items}.|Sort these numbers: {items}.|Sort this list: {items}.|"
        "Sort in ascending order: {items}.|Put these numbers in order: {items}."
    ),
    "reverse": (
        "Reverse {items}.|Reverse the list {items}.|Reverse this list: {items}.|Reverse the order of {items}.|"
        "Write this list in reverse order: {items}."
    ),
    "count_up": "Count from {a} to {b}.|Count up from {a} to {b}.|List the numbers from {a} to {b}.",
    "count_down": "Count from {a} to {b}.|Count down from {a} to {b}.|Count backwards from {a} to {b}.",
    "spell": (
        'Spell {word} backwards.|Spell the word {word} backwards.|Spell "{word}" backwards.|Write {word} backwards.|'
        "What is {word} spelled backwards?"
    ),
    "primes_within": (
        "List all prime numbers within {n}.|List all primes within {n}.|List all primes up to {n}.|"
        "List the prime numbers up to {n}.|What are the primes up to {n}?|Which numbers up to {n} are prime?"
    ),
    "primes_below": (
        "List all prime numbers below {n}.|List all primes below {n}.|List the primes less than {n}.|"
        "What are the prime numbers below {n}?|Which numbers below {n} are prime?"
    ),
    "introduce": (
        "Introduce yourself.|Please introduce yourself.|Who are you?|What are you?|What is your name?|What can you do?|"
        "Tell me about yourself.|Hello!|Hi!|Hello, who are you?"
    ),
}


@dataclass(frozen=True, slots=True)
class Example:
    """One question with the only answer that counts as right; a held-out example is never trained on."""

    question: str
    answer: str
    held_out: bool


def _is_held_out_text(text: str) -> bool:
    return zlib.crc32(text.encode()) % 10 == 0


def is_held_out(a: int, b: int) -> bool:
    """Whether the unordered pair is among the tenth that training never adds or subtracts."""
    return _is_held_out_text(f"{min(a, b)} {max(a, b)}")


TRAINED_WORDS = [word for word in WORDS if not _is_held_out_text(word)]


def _ask(rng: random.Random, kind: str, **values: object) -> str:
    """Phrase a question in one of its kind's ways, now and then in lower case or without its final mark."""
    question = rng.choice(QUESTIONS[kind].split("|")).format(**values)
    if rng.random() < 0.3:
        question = question.lower()
    return question.rstrip(".?!") if rng.random() < 0.3 else question


def _operand(rng: random.Random) -> int:
    return rng.randrange(rng.choice((10, 100, 1000, 1000, 1000)))


def make_sum(rng: random.Random) -> Example:
    """'What is 312 + 48?' is answered '312 + 48 = 360'; operands are 0 to 999."""
    a, b = _operand(rng), _operand(rng)
    return Example(_ask(rng, "sum", a=a, b=b), f"{a} + {b} = {a + b}", is_held_out(a, b))


def make_difference(rng: random.Random) -> Example:
    """'What is 48 - 312?' is answered '48 - 312 = -264'; operands are 0 to 999."""
    a, b = _operand(rng), _operand(rng)
    return Example(_ask(rng, "difference", a=a, b=b), f"{a} - {b} = {a - b}", is_held_out(a, b))


def make_sort(rng: random.Random) -> Example:
    """'Sort 31, 4, 15.' is answered '4, 15, 31'; two to six numbers, 0 to 99."""
    numbers = [rng.randrange(100) for _ in range(rng.randint(2, 6))]
    items = ", ".join(map(str, numbers))
    return Example(_ask(rng, "sort", items=items), ", ".join(map(str, sorted(numbers))), _is_held_out_text(items))


def make_reverse(rng: random.Random) -> Example:
    """'Reverse cat, moon, tree.' is answered 'tree, moon, cat'; two to six words or numbers."""
    size = rng.randint(2, 6)
    parts = rng.sample(TRAINED_WORDS, size) if rng.random() < 0.5 else [str(rng.randrange(100)) for _ in range(size)]
    items = ", ".join(parts)
    return Example(_ask(rng, "reverse", items=items), ", ".join(reversed(parts)), _is_held_out_text(items))


def make_count(rng: random.Random) -> Example:
    """'Count from 3 to 6.' is answered '3, 4, 5, 6'; up or down over at most 20 steps, between 0 and 120."""
    low = rng.randrange(120)
    high = min(120, low + rng.randint(1, 20))
    numbers = [str(number) for number in range(low, high + 1)]
    kind = rng.choice(("count_up", "count_down"))
    if kind == "count_down":
        numbers.reverse()
    question = _ask(rng, kind, a=numbers[0], b=numbers[-1])
    return Example(question, ", ".join(numbers), _is_held_out_text(f"count {low} {high}"))


def make_spell(rng: random.Random) -> Example:
    """'Spell moon backwards.' is answered 'n-o-o-m': hyphens make the answer one token a letter, whatever the word."""
    draw = rng.random()
    if draw < 0.5:
        word = rng.choice(WORDS)
        return Example(_ask(rng, "spell", word=word), "-".join(reversed(word)), _is_held_out_text(word))
    # Made-up words show every piece of a word in many places, so that words never seen can be spelled too.
    if draw < 0.9:
        head, tail = rng.choice(TRAINED_WORDS), rng.choice(TRAINED_WORDS)
        word = (head[: rng.randint(1, len(head))] + tail[rng.randrange(len(tail)) :])[:10]
    else:
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8)))
    if word in WORDS:
        return make_spell(rng)
    return Example(_ask(rng, "spell", word=word), "-".join(reversed(word)), held_out=False)


def make_primes(rng: random.Random) -> Example:
    """'List all primes below 8.' is answered '2, 3, 5, 7'; limits are 3 to 100. A closed set: nothing is held out."""
    limit = 100 if rng.random() < 0.1 else rng.randint(3, 100)
    kind = rng.choice(("primes_within", "primes_below"))
    stop = limit + 1 if kind == "primes_within" else limit
    primes = [str(n) for n in range(2, stop) if all(n % divisor for divisor in range(2, math.isqrt(n) + 1))]
    return Example(_ask(rng, kind, n=limit), ", ".join(primes), held_out=False)


def make_introduce(rng: random.Random) -> Example:
    """'introduce yourself' and its like have one answer. A closed set: nothing is held out."""
    return Example(_ask(rng, "introduce"), INTRODUCTION, held_out=False)


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of question and its share of the training mix."""

    make: Callable[[random.Random], Example]
    share: float
    closed: bool = False  # every example is trained, none is held out


TASKS = {
    "sum": Task(make_sum, 0.26),
    "difference": Task(make_difference, 0.26),
    "sort": Task(make_sort, 0.14),
    "reverse": Task(make_reverse, 0.10),
    "count": Task(make_count, 0.06),
    "spell": Task(make_spell, 0.13),
    "primes": Task(make_primes, 0.03, closed=True),
    "introduce": Task(make_introduce, 0.02, closed=True),
}


def training_example(rng: random.Random) -> Example:
    """Draw one example of the training mix, never a held-out one."""
    task = rng.choices(list(TASKS.values()), [task.share for task in TASKS.values()])[0]
    while (example := task.make(rng)).held_out:
        pass
    return example


def held_out_examples(task: str, count: int, seed: int = 0) -> list[Example]:
    """Return examples of one task that training never saw (of a closed task: examples as they are trained)."""
    if task not in TASKS:
        raise ValueError(f"task={task!r} is unknown; use one of {', '.join(TASKS)}")
    rng = random.Random(f"held out {task} {seed}")
    examples: list[Example] = []
    while len(examples) < count:
        example = TASKS[task].make(rng)
        if example.held_out or TASKS[task].closed:
            examples.append(example)
    return examples


def held_out_sums(count: int, seed: int = 0) -> list[Example]:
    """Return sums that training never saw in either order; the answer's last word is the number."""
    return held_out_examples("sum", count, seed)
