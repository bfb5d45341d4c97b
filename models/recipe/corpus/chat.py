"""The chat slice: explanations, stories, how-to answers, small tasks and small talk."""

from __future__ import annotations

from collections.abc import Callable

from specllama.models.recipe.corpus.base import (
    ANIMALS,
    COLOURS,
    FRUIT,
    JOBS,
    PLACES,
    THINGS,
    WEEKDAYS,
    Check,
    Message,
    Sample,
    Source,
    an,
    conversation,
    turn,
)
from specllama.models.recipe.corpus.topics import HOWTOS, TOPICS, Topic

_SYSTEM = (
    "You [know|explain] [how language models work|local models|speculative decoding].",
    "You are a [friendly|patient|calm] [guide|teacher|helper].",
    "[Explain things simply.|Use short sentences.|Answer in a friendly way.]",
    "~You answer questions about models in short sentences.",
)
_WHAT = (
    "What is {x}?",
    "[Explain|Describe] {x}.",
    "[Can|Could] you explain {x}?",
    "What does {x} mean?",
    "[Tell me|Say something] about {x}.",
    "I have heard of {x}. What is it?",
    "~Please describe {x} to me.",
    "~In a few words, what is {x}?",
)
_WHY = (
    "Why does {x} matter?",
    "Why is {x} [useful|important]?",
    "What is the point of {x}?",
    "~Why should I care about {x}?",
)
_LEADS = ("", "", "", "[Sure.|Of course.|Gladly.] ", "[Good question.|Here is the idea.] ")
_SHORTER = (
    "Shorter, please.",
    "[In one sentence?|Can you say that in one sentence?]",
    "[Too long.|Make it shorter.]",
    "~Please cut that down.",
)
_AGAIN = (
    "[Say it again.|Repeat that.|Once more, please.]",
    "Can you repeat [that|this]?",
    "~I missed that, one more time?",
)
_MORE = (
    "[Tell me more.|More, please.|Go on.]",
    "Can you [add something|say more]?",
    "~What else is there to say?",
)
_THANKS = ("[Thanks|Thank you|Many thanks][!|.]", "[Great|Good], thanks.", "~That helped, thanks!")
_WELCOME = (
    "You are welcome[!|.]",
    "[Gladly!|Any time.|My pleasure.]",
    "[You are welcome|Gladly]. [Ask again any time.|Just ask if you need more.]",
)


def _explain(src: Source) -> list[Message]:
    topic = src.pick(TOPICS)
    name = src.pick(topic.names)
    if src.maybe(0.25):
        ask, parts = src.form(_WHY, x=name), [src.pick(topic.why), src.pick(topic.more)]
    else:
        ask, parts = src.form(_WHAT, x=name), [src.pick(topic.what), src.pick(topic.why)]
        if src.maybe(0.5):
            parts.append(src.pick(topic.more))
    parts = [src.spin(p) for p in parts]
    lead = src.spin(src.pick(_LEADS))
    turns = [turn("user", ask), turn("assistant", lead + " ".join(parts))]
    return turns + _after(src, topic, parts)


def _after(src: Source, topic: Topic, parts: list[str]) -> list[Message]:
    roll = src.between(0, 99)
    if roll < 12:
        return [turn("user", src.form(_SHORTER)), turn("assistant", parts[0])]
    if roll < 24:
        return [turn("user", src.form(_AGAIN)), turn("assistant", " ".join(parts))]
    if roll < 36:
        left = [m for m in topic.more if src.spin(m) not in parts] or list(topic.more)
        return [turn("user", src.form(_MORE)), turn("assistant", src.spin(src.pick(left)))]
    if roll < 44:
        return [turn("user", src.form(_THANKS)), turn("assistant", src.form(_WELCOME))]
    return []


def _compare(src: Source) -> list[Message]:
    one, two = src.few(TOPICS, 2)
    a, b = one.names[0], two.names[0]
    ask = src.form(
        (
            "What is the difference between {a} and {b}?",
            "[Compare|Explain] {a} and {b}.",
            "{a} or {b}: what is what?",
            "~How do {a} and {b} differ?",
        ),
        a=a,
        b=b,
    )
    answer = " ".join(src.spin(src.pick(t.what)) for t in (one, two))
    return [turn("user", ask), turn("assistant", answer)]


def _how_to(src: Source) -> list[Message]:
    howto = src.pick(HOWTOS)
    ask = src.form(
        (
            "How do I {t}?",
            "How can I {t}?",
            "[Give|Show] me the steps to {t}.",
            "[Explain|Tell me] how to {t}.",
            "~What do I have to do to {t}?",
        ),
        t=howto.task,
    )
    steps = [src.spin(s) for s in howto.steps]
    if src.maybe(0.6):
        answer = "\n".join(f"{i}. {s}" for i, s in enumerate(steps, 1))
        if src.maybe(0.5):
            answer += "\n\n" + src.spin(howto.hint)
    else:
        words = ["First, ", "Then ", "Next, ", "After that, ", "Finally, "]
        words = [words[0], *words[1 : len(steps) - 1], words[-1]]
        answer = " ".join(w + s[0].lower() + s[1:] for w, s in zip(words, steps, strict=True))
        answer += " " + src.spin(howto.hint)
    turns = [turn("user", ask), turn("assistant", answer)]
    if src.maybe(0.3):
        n = src.between(1, len(steps))
        ask = src.form(("What was step {n}?", "Repeat step {n}.", "~Step {n} again, please."), n=n)
        turns += [turn("user", ask), turn("assistant", steps[n - 1])]
    return turns


def _story(src: Source) -> list[Message]:
    name, friend = src.given(), src.given()
    animal, colour, thing = src.pick(ANIMALS), src.pick(COLOURS), src.pick(THINGS)
    place, job = src.pick(PLACES), src.pick(JOBS)
    town = src.town()
    slots: dict[str, object] = {
        "n": name,
        "f": friend,
        "a": animal,
        "c": colour,
        "o": thing,
        "p": place,
        "j": job,
        "t": town,
    }
    openings = (
        "Once there was a {j} called {n} who lived in {t}.",
        "[Long ago|Many years ago], {n} the {j} lived near the {p} of {t}.",
        "In {t} there lived a {j} named {n}.",
    )
    troubles = (
        "One [morning|evening|day] {n} lost a {c} {o}.",
        "One [morning|night|day] {n} found a {c} {o} at the {p}.",
        "One [winter|summer] a {c} {o} [vanished|went missing] from the {p}.",
    )
    middles = (
        "{n} asked {f}, but {f} had not seen it.",
        "{n} looked [in every corner|under every stone] of the {p}.",
        "A {a} came by and [looked at|sniffed at] {n}.",
        '"[Do not worry|Wait for me|I can help]," said {f}.',
        "The {a} ran to the {p}, and {n} [followed|ran after it].",
        "It [rained|snowed] all day, but {n} did not [stop|give up].",
        "Then {f} had an idea: they [asked|fed|followed] the {a}.",
    )
    endings = (
        "At last the {a} [brought|carried] the {o} back, and {n} [smiled|laughed].",
        "In the end {n} gave the {c} {o} to {f}, and they [stayed|remained] friends.",
        "From that day on the {c} {o} [hung|stood|lay] at the {p}, and everyone in {t} knew why.",
        "[That night|That evening] {n}, {f} and the {a} [sat|sang] together at the {p}.",
    )
    ask = src.form(
        (
            "Tell me a [short |]story about {n}, a {a} and a {c} {o}.[ Let it play in {t}.|]",
            "[Write|Tell] a story [with|about] {n} the {j} and {f}.",
            "A story about a {c} {o} at the {p}, please. [The hero is {n}.|]",
            "~I want to hear a story about {n} from {t} and a {a}.",
        ),
        **slots,
    )
    lines = [src.pick(openings), src.pick(troubles), *src.few(middles, src.between(1, 4))]
    story = " ".join(src.spin(s, **slots) for s in [*lines, src.pick(endings)])
    turns = [turn("user", ask.strip()), turn("assistant", story)]
    roll = src.between(0, 9)
    if roll == 0:
        turns += [turn("user", src.form(_AGAIN)), turn("assistant", story)]
    elif roll in (1, 2):
        question, answer = src.pick(
            [
                ("Who was the story about?", f"It was about {name}."),
                ("What colour was it?", f"It was {colour}."),
                ("Which animal was in [it|the story]?", f"It was a {animal}."),
            ]
        )
        if animal in story and colour in story:
            turns += [turn("user", src.spin(question)), turn("assistant", answer)]
    return turns


def _echo(src: Source) -> list[Message]:
    """Make a task that copies and rearranges the user's words."""
    pools = src.pick([FRUIT, ANIMALS, COLOURS, THINGS])
    words = src.few(pools, src.between(2, 4))
    if src.maybe(0.5):
        words = [src.word() for _ in range(src.between(2, 5))]
    listed = ", ".join(words)
    ask, answer = src.pick(
        [
            (
                ("Write these as a list: {x}", "Make a list of {x}.", "~List these: {x}"),
                "\n".join(f"- {w}" for w in words),
            ),
            (
                ("Number these: {x}", "Make a numbered list: {x}", "~Put numbers to these: {x}"),
                "\n".join(f"{i}. {w}" for i, w in enumerate(words, 1)),
            ),
            (("Repeat after me: {x}", "[Say|Write]: {x}", "~Copy this: {x}"), listed),
            (
                (
                    "What is the first [word|one] of: {x}?",
                    "First of {x}?",
                    "~Which comes first in: {x}?",
                ),
                f"{words[0]}",
            ),
            (
                (
                    "What is the last [word|one] of: {x}?",
                    "Last of {x}?",
                    "~Which comes last in: {x}?",
                ),
                f"{words[-1]}",
            ),
            (
                ("Write {x} in upper case.", "Upper case: {x}", "~Make {x} upper case."),
                listed.upper(),
            ),
            (
                (
                    "Join these with a dash: {x}",
                    "Put dashes between {x}.",
                    "~Replace the commas by dashes: {x}",
                ),
                "-".join(words),
            ),
            (
                ("How many words are these: {x}?", "Count these: {x}", "~How many are there: {x}?"),
                f"{['', 'One', 'Two', 'Three', 'Four', 'Five'][len(words)]}.",
            ),
            (
                ("Reverse the order: {x}", "Turn around: {x}", "~List these backwards: {x}"),
                ", ".join(reversed(words)),
            ),
        ]
    )
    return [turn("user", src.form(ask, x=listed)), turn("assistant", answer)]


def _numbers(src: Source) -> list[Message]:
    kind = src.between(0, 2)
    a, b = src.between(0, 20), src.between(0, 20)
    if kind == 0:
        return [
            turn(
                "user",
                src.form(("What is {a} + {b}?", "{a} plus {b}?", "~Add {a} and {b}."), a=a, b=b),
            ),
            turn("assistant", f"{a} + {b} = {a + b}"),
        ]
    if kind == 1:
        a, b = src.few(range(100), 2)
        return [
            turn(
                "user",
                src.form(
                    (
                        "Which is larger, {a} or {b}?",
                        "Larger: {a} or {b}?",
                        "~Is {a} or {b} the larger number?",
                    ),
                    a=a,
                    b=b,
                ),
            ),
            turn("assistant", f"{max(a, b)} is larger."),
        ]
    i = src.between(0, 6)
    return [
        turn(
            "user",
            src.form(
                ("Which day comes after {d}?", "What follows {d}?", "~Name the day after {d}."),
                d=WEEKDAYS[i],
            ),
        ),
        turn("assistant", f"After {WEEKDAYS[i]} comes {WEEKDAYS[(i + 1) % 7]}."),
    ]


def _small_talk(src: Source) -> list[Message]:
    name, town, thing = src.given(), src.town(), src.pick(THINGS)
    food, job = src.pick(FRUIT), src.pick(JOBS)
    slots: dict[str, object] = {"n": name, "t": town, "o": thing, "f": food, "j": job}
    pairs: list[tuple[tuple[str, ...], str]] = [
        (
            ("[Hello|Hi|Hey][!|.|]", "[Good morning|Good evening][!|.]", "~Hello there!"),
            "[Hello|Hi]! [How can I help|What can I do for you]?",
        ),
        (
            (
                "[Hello|Hi], [I am|my name is] {n}.",
                "[I am|This is] {n}. [Hello|Hi][!|.]",
                "~They call me {n}.",
            ),
            "[Hello|Hi], {n}! [How can I help|What can I do for you|Nice to meet you][!|.]",
        ),
        (
            (
                "[Hi|Hello], {n} from {t} here.",
                "I am {n} and I live in {t}.",
                "~{n} here, from {t}.",
            ),
            "Hello, {n}! How is [life|the weather] in {t}?",
        ),
        (
            ("How are you?", "How is it going?", "~Are you well?"),
            "[I am well, thank you.|All is well.] [And you?|What can I do for you?]",
        ),
        (
            ("Who are you?", "What are you?", "What can you do?", "~What is your name?"),
            "I am tiny, a [small|very small] language model. [I can explain, write short code and "
            "fill JSON.|I run on your own machine.|I was made for tests and demos.]",
        ),
        (
            ("I like {f}.", "I love {f}.", "~My favourite food is {f}."),
            "[{f} are a good choice.|Nice, {f}!] [Do you eat them often?|What else do you like?]",
        ),
        (
            ("I work as a {j}.", "I am a {j}.", "~My trade is {j}."),
            "[A {j}!|So you are a {j}.] [What do you like about it?|That sounds interesting.]",
        ),
        (
            ("I lost my {o}.", "I cannot find my {o}.", "~My {o} is gone."),
            "[I am sorry.|Oh no.] Where did you last see your {o}?",
        ),
        (
            (
                "[Bye|Goodbye|See you][!|.]",
                "[I have to go|That is all]. [Bye|Goodbye][!|.]",
                "~Until next time!",
            ),
            "[Goodbye|See you|Take care][!|.] [Come back any time.|Have a good day.|]",
        ),
        (
            (
                "What is the capital of {t}?",
                "Who is {n}?",
                "What did {n} eat today?",
                "~How old is {n}?",
            ),
            "I do not know. [I only know what you tell me.|Can you tell me more?]",
        ),
    ]
    ask, answer = src.pick(pairs)
    question = turn("user", src.form(ask, **slots))
    turns = [question, turn("assistant", src.spin(answer, **slots).strip())]
    if "{n}" in answer and src.maybe(0.5):
        more = src.pick([_explain, _numbers, _echo])(src)
        turns += more[:2]
        if src.maybe(0.6):
            ask2 = src.form(("What is my name?", "Do you know my name?", "~How am I called?"))
            turns += [turn("user", ask2), turn("assistant", f"Your name is {name}.")]
    elif src.maybe(0.25):
        turns += [turn("user", src.form(_THANKS)), turn("assistant", src.form(_WELCOME))]
    return turns


_KINDS: tuple[Callable[[Source], list[Message]], ...] = (
    _explain,
    _explain,
    _explain,
    _explain,
    _compare,
    _how_to,
    _how_to,
    _story,
    _story,
    _story,
    _story,
    _echo,
    _echo,
    _numbers,
    _small_talk,
    _small_talk,
)


def chat_sample(src: Source) -> Sample:
    """Make one chat of one to three turns."""
    turns = [turn(m["role"], an(m["content"])) for m in src.pick(_KINDS)(src)]
    return conversation(src, "chat", turns, Check("none"), _SYSTEM)
