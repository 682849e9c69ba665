"""States: programs that run together, streams, errors, values. Expected texts are those of calls of their own."""

import asyncio
import threading

import pytest
from tokenizers import processors

from mini_engine import SamplingParams, lang
from mini_engine.lang.run import hub_of
from tests.lang.conftest import make_llm

STORY = "Once upon a time there was a fox named"


def append(state, piece):
    state += piece


def alone(llm, ids, **params):
    """What the engine answers to these ids."""
    return llm.generate([list(ids)], SamplingParams(**params))[0]


def encode(llm, text):
    return llm.tokenizer.encode(text, add_special_tokens=False)


def test_the_token_that_ends_an_answer_is_not_kept(llm):
    @lang.program
    def turn(s):
        s += lang.user("Hello") + lang.assistant(lang.gen("answer", max_new_tokens=200))

    s = turn.run(backend=llm)
    assert s.answer("answer").output.finish_reason == "stop"
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": s["answer"]}]
    assert s.text == llm.tokenizer.apply_chat_template(chat, tokenize=False)
    assert s.ids.count(llm.tokenizer.eos_token_id) == 2


def test_what_a_backend_refuses_is_raised_where_it_is_read_and_at_the_end(llm):
    seen = []

    @lang.program
    def wrong(s):
        s += STORY + lang.gen("first", max_new_tokens=2)
        s += lang.gen("much", max_new_tokens=10**6) + lang.gen("after", max_new_tokens=2)
        for name in ("first", "much", "after"):
            try:
                seen.append(s[name])
            except ValueError as error:
                seen.append(error)

    with pytest.raises(ValueError, match="1000000") as caught:
        wrong.run(backend=llm)
    assert isinstance(seen[0], str)
    assert seen[1:] == [caught.value] * 2


def test_a_joined_fork_takes_nothing_more(llm):
    @lang.program
    def after(s):
        s += STORY
        forks = s.fork(2)
        s.join(forks)
        with pytest.raises(ValueError, match="joined; append to its parent"):
            forks[0] += "more"
        with pytest.raises(ValueError, match="joined before"):
            s.join(forks)

    after.run(backend=llm)


def test_one_program_that_fails_stops_no_other(llm):
    @lang.program
    def maybe(s, length):
        s += STORY + lang.gen("name", max_new_tokens=length)
        if length == 3:
            raise ZeroDivisionError("own")
        s["name"]

    states = maybe.run_batch([{"length": n} for n in (1, 10**6, 2, 3)], backend=llm)
    assert [type(s.error) for s in states] == [type(None), ValueError, type(None), ZeroDivisionError]
    assert states[2]["name"].startswith(states[0]["name"])
    assert not llm.engine.has_work
    assert not llm.engine.entries


def test_programs_that_read_run_together(llm):
    @lang.program
    def reading(s, word):
        s += STORY + word
        for index in range(3):
            s += lang.gen(f"part {index}", max_new_tokens=4)
            s[f"part {index}"]
        seen.append(threading.active_count())

    seen = []
    words = [{"word": f" {w}"} for w in "Mila Tom Ben Anna Leo Ida Max Eva".split()]
    before = llm.engine.log.num_steps
    threads = threading.active_count()
    states = reading.run_batch(words, backend=llm)
    together = llm.engine.log.num_steps - before
    assert together <= 3 * 4 + 6  # a single program takes 12 steps and the first of its prompt
    assert set(seen) == {threads}, "no thread is started"
    assert [s.text for s in states] == [s.text for s in reading.run_batch(words, backend=llm, num_workers=1)]


def test_workers_limit_what_is_under_way(llm):
    most = []

    @lang.program
    def counting(s, number):
        s += STORY + f" {number}" + lang.gen("name", max_new_tokens=2)
        most.append(len(hub_of(llm).backend.calls))
        s["name"]

    counting.run_batch([{"number": n} for n in range(9)], backend=llm, num_workers=3)
    assert max(most) == 3
    with pytest.raises(ValueError, match="num_workers is 0"):
        counting.run_batch([], backend=llm, num_workers=0)


def test_a_stream_gives_the_text_as_it_comes(llm):
    @lang.program
    def tale(s):
        s += STORY + lang.gen("rest", max_new_tokens=12, stop="zzz")

    s = tale.start(backend=llm, max_new_tokens=3)  # a default, which gives way to what a gen says
    pieces = list(s.stream("rest"))
    assert "".join(pieces) == s["rest"] == alone(llm, encode(llm, STORY), max_new_tokens=12).text
    assert len([piece for piece in pieces if piece]) > 6


def test_a_program_that_raises_leaves_nothing_in_the_engine(llm):
    @lang.program
    def stops(s):
        s += STORY + lang.gen("rest", max_new_tokens=500)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stops.run(backend=llm)
    assert not llm.engine.has_work
    assert not hub_of(llm).backend.calls


def test_a_program_may_run_another(llm):
    @lang.program
    def inner(s, word):
        s += STORY + word + lang.gen("name", max_new_tokens=2)

    @lang.program
    def outer(s, word):
        s += f"{word}: " + inner.run(word, backend=llm)["name"]
        s += ", ".join(state["name"] for state in inner.run_batch([{"word": w} for w in "abc"], backend=llm))

    states = outer.run_batch([{"word": " Mila"}, {"word": " Tom"}], backend=llm)
    for state, word in zip(states, (" Mila", " Tom"), strict=True):
        names = [alone(llm, encode(llm, STORY) + encode(llm, w), max_new_tokens=2).text for w in (word, "a", "b", "c")]
        assert state.text == f"{word}: {names[0]}" + ", ".join(names[1:])


def test_the_async_forms_do_the_same(llm):
    @lang.program
    def tale(s, word):
        s += STORY + word + lang.gen("name", max_new_tokens=3)

    async def both():
        one = tale.run_async(" Mila", backend=llm)
        many = tale.run_batch_async([{"word": " Mila"}, {"word": " Tom"}], backend=llm)
        return await asyncio.gather(one, many)

    one, many = asyncio.run(both())
    assert [one.text, *(s.text for s in many)] == [tale.run(w, backend=llm).text for w in (" Mila", " Mila", " Tom")]


def test_values_have_the_type_that_was_asked_for(llm):
    @lang.program
    def typed(s):
        s += "Record: age = " + lang.gen("age", type=int, max_new_tokens=40)
        s += ", weight = " + lang.gen("weight", type=float, max_new_tokens=60)
        s += ", happy = " + lang.gen("happy", type=bool)
        s += ", color: " + lang.gen("color", choices=["red", "blue"])

    s = typed.run(backend=llm)
    assert [type(s[name]) for name in ("age", "weight", "happy", "color")] == [int, float, bool, str]
    assert s["color"] in ("red", "blue")
    assert s.text.startswith(f"Record: age = {s['age']}, weight = ")
    with pytest.raises(KeyError, match="nothing sets 'colour'; there are age, weight, happy, color"):
        s["colour"]


def test_a_grammar_that_was_cut_is_an_error_and_not_a_value(llm):
    @lang.program
    def long(s):
        s += STORY + lang.gen("digits", regex="[0-9]{40}", max_new_tokens=3)

    with pytest.raises(ValueError, match="cut after 3 tokens, before its regex was complete"):
        long.run(backend=llm)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lang.gen("a", max_token=3), "max_token is not a sampling parameter"),
        (lambda: lang.gen("a", max_tokens=3), "max_tokens is called max_new_tokens here"),
        (lambda: lang.gen("a", n=2), "n is not a sampling parameter of gen"),
        (lambda: lang.gen("a", type=list), "choose str, int, float or bool"),
        (lambda: lang.gen("a", type=int, regex="a"), "type is int and there is a regex"),
        (lambda: lang.gen("a", choices=["a"], temperature=1.0), "choices are scored"),
        (lambda: lang.select("a", []), "at least one text"),
        (lambda: lang.select("a", ["b", ""]), "none of them empty"),
        (lambda: lang.select("a", ["b", "b"]), "two of them are equal"),
        (lambda: lang.select("a", ["b"], "best"), "choose mean, greedy or unconditional"),
        (lambda: lang.user(lang.user("a")), "turn of the user inside a turn"),
        (lambda: lang.program(lambda: None), "takes the state as its first parameter"),
        (lambda: lang.program(lambda s, temperature: None), "'temperature' of a program is an option"),
    ],
)
def test_what_is_wrong_is_refused_where_it_is_written(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_call_without_any_text_says_so(llm):
    @lang.program
    def nothing(s, piece):
        s += piece

    with pytest.raises(ValueError, match="the prompt has 0 tokens"):
        nothing.run(lang.gen("a"), backend=llm)
    with pytest.raises(ValueError, match="select compares choices after a text"):
        nothing.run(lang.select("a", ["b", "c"]), backend=llm)


@pytest.fixture
def with_bos():
    """An engine with a tokenizer that puts a token before a text and another one behind it."""
    llm = make_llm()
    own = llm.tokenizer.backend_tokenizer
    named = [(name, own.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")]
    own.post_processor = processors.TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=named)
    return llm


@pytest.mark.parametrize("canonical", [False, True])
def test_a_program_begins_as_a_text_does(with_bos, canonical):
    @lang.program
    def story(s):
        s += ""
        s += STORY
        s += " Ida" + lang.gen("first", max_new_tokens=4)
        (fork,) = s.fork()
        fork += " and" + lang.gen("second", max_new_tokens=4)

    @lang.program
    def forks_at_the_beginning(s):
        forks = s.fork(2)
        forks[0] += STORY
        forks[1] += " Ida"
        s.join(forks, appends=True)
        s += lang.gen("first", max_new_tokens=4)

    @lang.program
    def chat(s):
        s += lang.user("Hello") + lang.assistant(lang.gen("answer", max_new_tokens=4))

    transformers_ids = with_bos.tokenizer(STORY).input_ids[:-1]
    s = story.run(backend=with_bos, canonical=canonical)
    assert s.text.startswith(STORY + " Ida")
    for output in s.answer("first").output, s.forks[0].answer("second").output:
        assert output.prompt_ids[: len(transformers_ids)] == transformers_ids
        assert output.prompt_ids.count(transformers_ids[0]) == 1
    joined = forks_at_the_beginning.run(backend=with_bos, canonical=canonical)
    assert joined.text.startswith(STORY + " Ida")
    assert joined.answer("first").output.prompt_ids.count(transformers_ids[0]) == 1
    messages = [{"role": "user", "content": "Hello"}]
    templated = with_bos.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert chat.run(backend=with_bos, canonical=canonical).answer("answer").output.prompt_ids == templated
