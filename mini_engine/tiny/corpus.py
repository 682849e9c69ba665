"""The training text of the embedded model, which this program writes from a seed.

There are four kinds of document, all about the same world of animals, people and things:

* ``story``   "Once upon a time there was a shy fox named Mila ...", plain or as an answer in a chat
* ``record``  a few facts about a person, answered as one line of JSON
* ``facts``   questions about who owns what
* ``talk``    greetings and several turns in one conversation

The model must learn to copy. If it has seen "Mila" ten thousand times, it can write the name from memory. It can only
copy "Trozeka" from the prompt. So most names are invented from syllables, and every tenth name is held out: it never
occurs in training, and the quality figures are measured on held-out names only.
"""

import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mini_engine.tiny.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLORS,
    FOODS,
    GREETINGS,
    JOBS,
    NAMES,
    OBJECTS,
    PLACES,
    PLOTS,
    SYLLABLE_ENDS,
    SYLLABLE_STARTS,
    VOWELS,
    Plot,
)

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
THINK, THINK_END = "<think>", "</think>"
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Task:
    """One question with its answer: ``prompt`` by the user, ``thought`` inside the think block, ``answer`` after it.

    ``facts`` holds what a right answer must contain: the story's name and animal, or a record's fields.
    """

    prompt: str
    thought: str
    answer: str
    facts: dict[str, str | int | bool]


def is_held_out(name: str) -> bool:
    """Whether ``name`` is kept out of training: one name in ten, chosen by its checksum."""
    return zlib.crc32(name.encode()) % 10 == 0


def make_name(rng: random.Random, held_out: bool = False) -> str:
    """Draw a first name, common (one in four) or invented, from the training part or from the held-out part."""
    while True:
        if rng.random() < 0.25:
            name = rng.choice(NAMES)
        else:
            syllables = [rng.choice(SYLLABLE_STARTS) + rng.choice(VOWELS) for _ in range(rng.choice((2, 2, 2, 3)))]
            name = ("".join(syllables) + rng.choice(SYLLABLE_ENDS)).capitalize()
        if is_held_out(name) == held_out:
            return name


def make_odd_name(rng: random.Random, held_out: bool = False) -> str:
    """Draw a first name, half of the time one of random letters in common sound patterns ("Ixpod", "Quva").

    From syllables alone a model learns to copy syllables. These names can have any pair of letters, as a user's may.
    """
    if rng.random() < 0.5:
        return make_name(rng, held_out)
    while True:
        pattern = rng.choice(("cvc", "vcv", "cvcv", "vccv", "cvccv", "cvcvc", "vcvcv", "cvccvc", "ccvcvc", "vccvcv"))
        letters = (rng.choice("aeiouy" if kind == "v" else "bcdfghjklmnpqrstvwxz") for kind in pattern)
        name = "".join(letters).capitalize()
        if is_held_out(name) == held_out:
            return name


NameMaker = Callable[[random.Random, bool], str]


def with_article(noun: str) -> str:
    """Put "a" or "an" before ``noun``."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


# ---------------------------------------------------------------------------------------------------------- stories


@dataclass(frozen=True)
class Cast:
    """Who and what a story is about; its fields fill the slots of the templates in ``words.PLOTS``."""

    name: str
    animal: str
    adjective: str
    friend: str
    friend_animal: str
    thing: str
    place: str
    female: bool

    def slots(self) -> dict[str, str]:
        """Return the template slots: n, a, adj, f, b, o, p and the pronouns."""
        he, his, him = ("she", "her", "her") if self.female else ("he", "his", "him")
        an_b = with_article(self.friend_animal)
        return {
            "n": self.name,
            "a": self.animal,
            "an_a": with_article(self.animal),
            "an_adj_a": with_article(f"{self.adjective} {self.animal}"),
            "f": self.friend,
            "b": self.friend_animal,
            "an_b": an_b,
            "An_b": an_b.capitalize(),
            "o": self.thing,
            "an_o": with_article(self.thing),
            "p": self.place,
            "he": he,
            "his": his,
            "him": him,
            "He": he.capitalize(),
            "His": his.capitalize(),
        }


def make_cast(rng: random.Random, held_out: bool = False, names: NameMaker = make_name) -> Cast:
    """Draw a hero and a friend with different names and different animals."""
    name = names(rng, held_out)
    animal = rng.choice(ANIMALS)
    return Cast(
        name=name,
        animal=animal,
        adjective=rng.choice(ADJECTIVES),
        friend=names(rng, False),
        friend_animal=rng.choice([a for a in ANIMALS if a != animal]),
        thing=f"{rng.choice(COLORS)} {rng.choice(OBJECTS)}",
        place=rng.choice(PLACES),
        female=rng.random() < 0.5,
    )


def tell_story(rng: random.Random, cast: Cast, plot: Plot) -> str:
    """Tell one plot: an opening, then one sentence choice for each beat of the plot."""
    opening = rng.choice(
        (
            "Once upon a time there was {an_adj_a} named {n}. {n} lived in {p}.",
            "Once upon a time there was {an_a} named {n} who lived in {p}.",
            "Once there was {an_adj_a} called {n}. {He} lived in {p}.",
            "In {p} there lived {an_adj_a} named {n}.",
            "{n} was {an_adj_a} who lived in {p}.",
            "There once was {an_a} named {n}. {n} the {a} lived in {p}.",
        )
    )
    sentences = [opening, *(rng.choice(beat) for beat in plot.beats)]
    return " ".join(sentences).format(**cast.slots())


def story_task(rng: random.Random, held_out: bool = False, names: NameMaker = make_name) -> Task:
    """Ask for a story about an animal with a name, sometimes with a place or a thing, and tell it."""
    cast = make_cast(rng, held_out, names)
    plot = rng.choice(PLOTS)
    slots = cast.slots()
    ask = rng.choice(
        (
            "Tell me a story about {an_a} named {n}.",
            "Write a short story about {an_a} named {n}.",
            "Tell me a story about {n} the {a}.",
            "Please write a story about {an_a} called {n}.",
            "Can you tell me a story? It should be about {an_a} named {n}.",
            "I want a story about {n}. {n} is {an_a}.",
        )
    )
    ask += rng.choice(("", "", "", " It happens in {p}.", " {n} has {an_o}.", " {n} has a friend named {f}."))
    thought = rng.choice(
        (
            "The story is about {an_a} named {n}.",
            "The user wants a story about {n}. {n} is {an_a}.",
            "I need a story. The hero is {n} the {a}.",
        )
    )
    thought += rng.choice(("", f" In the story, {plot.idea}.", f" Let me think. I can tell how {plot.idea}."))
    facts: dict[str, str | int | bool] = {"name": cast.name, "animal": cast.animal}
    return Task(ask.format(**slots), thought.format(**slots), tell_story(rng, cast, plot), facts)


# ---------------------------------------------------------------------------------------------------------- records


def record_fields(rng: random.Random, held_out: bool, names: NameMaker) -> dict[str, str | int | bool]:
    """Draw a person: a name and two to four more fields, in random order after the name."""
    others: dict[str, str | int | bool] = {
        "age": rng.randint(1, 99),
        "city": rng.choice(CITIES),
        "job": rng.choice(JOBS),
        "pet": rng.choice(ANIMALS),
        "color": rng.choice(COLORS),
        "food": rng.choice(FOODS),
        "happy": rng.random() < 0.5,
    }
    chosen = rng.sample(sorted(others), rng.randint(2, 4))
    return {"name": names(rng, held_out), **{key: others[key] for key in chosen}}


def describe_field(rng: random.Random, key: str, value: str | int | bool) -> str:
    """Say one field of a record as the rest of a sentence whose subject is the person."""
    if key == "happy":
        return "is happy" if value else "is not happy"
    forms = {
        "age": ("is {v} years old", "is {v}"),
        "city": ("lives in {v}", "is from {v}"),
        "job": ("works as {an_v}", "is {an_v}"),
        "pet": ("has {an_v}", "has a pet {v}"),
        "color": ("likes the color {v}", "loves {v}"),
        "food": ("likes to eat {v}", "eats {v}"),
    }
    return rng.choice(forms[key]).format(v=value, an_v=with_article(str(value)))


def record_task(rng: random.Random, held_out: bool = False, names: NameMaker = make_name) -> Task:
    """Describe a person in a sentence or as a list of fields, and answer with the same fields as JSON."""
    fields = record_fields(rng, held_out, names)
    name = str(fields["name"])
    if rng.random() < 0.3:
        listed = ", ".join(f"{k} {json.dumps(v) if isinstance(v, bool) else v}" for k, v in fields.items())
        text = rng.choice(("Record: {}.", "Make a record: {}.", "Write as JSON: {}.")).format(listed)
    else:
        parts = [describe_field(rng, k, v) for k, v in fields.items() if k != "name"]
        if rng.random() < 0.5:
            body = f"{name} " + ", ".join(parts[:-1]) + f" and {parts[-1]}."
        else:
            body = " ".join(f"{name} {part}." for part in parts)
        ask = rng.choice(("Turn this into JSON.", "Write this as JSON.", "Make a JSON record.", "Answer in JSON."))
        text = f"{ask} {body}" if rng.random() < 0.5 else f"{body} {ask}"
    thought = rng.choice(("The fields are {k}.", "I need a record with {k}.", "This is about {n}. The fields are {k}."))
    return Task(text, thought.format(k=", ".join(fields), n=name), json.dumps(fields), fields)


# ------------------------------------------------------------------------------------------------------------ facts


def facts_task(rng: random.Random, held_out: bool = False, names: NameMaker = make_name) -> Task:
    """State what two to four people own, and ask about one of them."""
    count = rng.randint(2, 4)
    people: list[str] = []
    while len(people) < count:
        name = names(rng, held_out)
        if name not in people:
            people.append(name)
    things = rng.sample(OBJECTS, count)
    colors = [rng.choice(COLORS) for _ in people]
    rows = list(zip(people, colors, things, strict=True))
    told = " ".join(f"{n} has {with_article(f'{c} {t}')}." for n, c, t in rows)
    n, c, t = rng.choice(rows)
    owned = f"{n} has {with_article(f'{c} {t}')}."
    question, answer, key = rng.choice(
        (
            (f"What does {n} have?", owned, f"{c} {t}"),
            (f"Who has the {t}?", f"{n} has the {t}.", n),
            (f"What color is the {t}?", f"The {t} is {c}.", c),
            (f"What color is the {t} of {n}?", f"The {t} of {n} is {c}.", c),
        )
    )
    return Task(f"{told} {question}", owned, answer, {"answer": key})


# ------------------------------------------------------------------------------------------------------------- chat


def render_turn(task: Task, mode: str) -> str:
    """Write one user turn and its answer. ``mode``: "think", "no_think" (empty block) or "past" (block dropped)."""
    block = {
        "think": f"{THINK}\n{task.thought}\n{THINK_END}\n\n",
        "no_think": f"{THINK}\n\n{THINK_END}\n\n",
        "past": "",
    }[mode]
    user = f"{IM_START}user\n{task.prompt}{IM_END}\n"
    return f"{user}{IM_START}assistant\n{block}{task.answer}{IM_END}\n"


def follow_up(rng: random.Random, task: Task) -> Task:
    """Ask about a story that was told one turn earlier."""
    name = task.facts["name"]
    animal = str(task.facts["animal"])
    prompt, answer = rng.choice(
        (
            ("Who is the story about?", f"The story is about {name} the {animal}."),
            (f"What is {name}?", f"{name} is {with_article(animal)}."),
            ("What is the name of the hero?", f"The name of the hero is {name}."),
        )
    )
    return Task(prompt, f"The story is about {name} the {animal}.", answer, task.facts)


def greeting_task(rng: random.Random) -> Task:
    """Exchange a greeting or explain what the model can do."""
    prompt, answer = rng.choice(GREETINGS)
    return Task(prompt, rng.choice(("The user is friendly.", "I can answer this.", "This is easy.")), answer, {})


@dataclass(frozen=True)
class Mixture:
    """What a stretch of training text holds: how names are made, and the weights of stories, records and facts."""

    names: NameMaker = make_name
    weights: tuple[int, int, int] = (30, 45, 25)


def chat_document(rng: random.Random, mixture: Mixture) -> str:
    """Write a conversation of one to three turns, as the chat template renders it.

    As in Qwen3's template, think blocks of earlier turns are dropped and only the last answer keeps its block.
    """
    makers = (story_task, record_task, facts_task)
    tasks = [rng.choices(makers, weights=mixture.weights)[0](rng, False, mixture.names)]
    if rng.random() < 0.08:
        tasks.insert(0, greeting_task(rng))
    if "animal" in tasks[-1].facts and rng.random() < 0.25:
        tasks.append(follow_up(rng, tasks[-1]))
    elif rng.random() < 0.12:
        tasks.append(rng.choice(makers)(rng, False, mixture.names))
    elif rng.random() < 0.06:
        tasks = [greeting_task(rng)]
    last = "think" if rng.random() < 0.7 else "no_think"
    modes = ["past"] * (len(tasks) - 1) + [last]
    return "".join(render_turn(t, m) for t, m in zip(tasks, modes, strict=True))


def documents(seed: int, mixture: Mixture | None = None) -> Iterator[str]:
    """Yield training documents for ever, the same ones for the same arguments; each ends in ``<|endoftext|>``."""
    mixture = mixture or Mixture()
    rng = random.Random(seed)
    while True:
        if rng.random() < 0.3:
            yield tell_story(rng, make_cast(rng, False, mixture.names), rng.choice(PLOTS)) + END_OF_TEXT
        else:
            yield chat_document(rng, mixture) + END_OF_TEXT
