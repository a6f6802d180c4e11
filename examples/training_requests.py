"""Requests put together from word lists, and openings of user turns for a model to continue."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator

from smollm2 import HUMANEVAL_PROMPT

Prompt = tuple[str, str]  # source, text


def entries(text: str) -> list[str]:
    """The entries of a list with `|` between them, whose lines may break at any space."""
    return [" ".join(entry.split()) for entry in text.split("|")]


TOPICS = entries("""the water cycle|photosynthesis|the French Revolution|black holes|the stock
market|inflation|vaccines|machine learning|neural networks|climate change|renewable energy|the human heart|the
immune system|ancient Egypt|the Roman Empire|World War I|the Cold War|quantum computers|electric cars|the moon
landing|plate tectonics|volcanoes|coral reefs|the Amazon rainforest|honey bees|wolves|migrating birds|the Great Wall
of China|jazz music|classical music|Impressionist painting|Shakespeare's sonnets|Greek mythology|Norse
mythology|chess|soccer|basketball|the Olympic Games|yoga|meditation|a healthy breakfast|sleep|running a
marathon|strength training|budgeting|credit cards|buying a first house|job interviews|remote work|public
speaking|time management|leadership|teamwork|negotiation|starting a small business|e-commerce|social media|online
privacy|passwords|open source software|databases|SQL|Python|JavaScript|the command line|version
control|APIs|recursion|sorting algorithms|hash tables|linked lists|binary search|prime
numbers|fractions|probability|the Pythagorean theorem|calculus|linear algebra|supply and demand|democracy|human
rights|the United Nations|immigration|city planning|public
transport|bicycles|trains|airplanes|rockets|telescopes|the solar system|gravity|magnetism|electricity|atoms|chemical
bonds|acids and bases|DNA|evolution|dinosaurs|the Ice Age|fossil
fuels|recycling|composting|gardening|houseplants|cooking pasta|baking bread|coffee|tea|chocolate|vegetarian
food|street food|traveling alone|camping|hiking|winter sports|photography|film making|video games|board
games|science fiction|mystery novels|poetry|learning a language|sign
language|parenting|friendship|grief|gratitude|happiness|stress at
work|burnout|dogs|cats|horses|dolphins|sharks|penguins|elephants|the desert|the ocean|rivers|mountains|islands|the
Arctic|New York|Tokyo|Paris|Rome|Cairo|Mexico City|Sydney|Iceland|Kenya|Brazil|India|Italy|robots|3D
printing|drones|the printing press|the steam engine|the telephone|artificial intelligence|blockchain|cloud
computing|cybersecurity| telemedicine|nutrition|diabetes|allergies|first
aid|anatomy|psychology|philosophy|ethics|stoicism|economics|marketing|
accounting|taxes|insurance|retirement|volunteering|education|universities|libraries|museums|theater|dance|opera|
fashion|architecture|bridges|skyscrapers|lighthouses|castles|pirates|dragons|ghosts|time travel|aliens""")
FORMS = entries("""short story|poem|haiku|limerick|blog post|newspaper article|product description|movie review|book
review| speech|song|dialogue|diary entry|fairy tale|press release|newsletter|cover letter|thank-you note|travel
guide|social media post|advertisement|wedding toast|sonnet|essay|five-paragraph essay|summary|lesson
plan|quiz|recipe|to-do list| monologue|joke|riddle|letter to a friend|email|report|FAQ|tutorial|script for a short
video|podcast introduction""")
TONES = entries("funny|serious|friendly|formal|persuasive|dramatic|simple|poetic|sarcastic|hopeful|sad|professional")
READERS = entries("""a five-year-old|a high school student|a beginner|my grandmother|an expert|a busy
manager|college students|new employees|tourists|children|teenagers|engineers|parents|a general audience""")
ROLES = entries("""a doctor|a pirate|a history teacher|a travel agent|a famous chef|a detective|a fitness coach|a
poet|a lawyer|a therapist|an astronaut|a medieval knight|a software engineer|a stand-up comedian|a librarian|a math
tutor|a career counselor|a robot from the future|a wise old wizard|a news anchor|an economist|a farmer|a sea
captain|Sherlock Holmes| Leonardo da Vinci|Albert Einstein|Cleopatra|a talking cat|a museum guide|a startup
founder|a nurse|a judge""")
PEOPLE = entries("""my boss|a customer|my landlord|my neighbor|my professor|a recruiter|my team|my best friend|a
colleague|the city council|my sister|a supplier|a hotel|my doctor|the school principal|an old classmate""")
MATTERS = entries("""asking for a day off|apologizing for a late reply|about a broken heater|inviting them to a
party|asking for a raise|complaining about noise|thanking them for their help|about a delayed order|asking for
feedback on a report| declining an invitation|proposing a meeting next week|about a change of plans|asking for a
recommendation letter| congratulating them on a promotion|following up after an interview|announcing a new
product""")
REQUESTS = entries("""Write a {tone} {form} about {topic}.|Write a {form} about {topic}.|Write a {form} on {topic}
for {reader}.|Can you write a {tone} {form} about {topic}?|Explain {topic} to {reader}.|Explain {topic} in simple
terms.|What is the most important thing to know about {topic}?|What are the advantages and disadvantages of
{topic}?|Give me five facts about {topic}.|List ten ideas related to {topic}.|Tell me about {topic}.|I want to learn
about {topic}. Where should I start?| How does {topic} affect everyday life?|What is the history of {topic}?|Compare
{topic} and {other}.|What is the difference between {topic} and {other}?|How are {topic} and {other}
connected?|Which is more interesting, {topic} or {other}? Give reasons.|Imagine you are {role}. What would you say
about {topic}?|Pretend to be {role} and explain {topic} to {reader}.|Act as {role}. I will ask you about {topic}.
Begin by introducing yourself.|You are {role}. Write a {form} about {topic}.|Write an email to {person}
{matter}.|Draft a {tone} message to {person} {matter}.|Help me write a letter to {person} {matter}. Keep it
short.|Give me a step-by-step guide to {topic}.|What are common mistakes people make with {topic}?|Create an outline
for a presentation about {topic}.|Write three questions about {topic} and answer them.|Make a table with facts about
{topic} and {other}.|Write the opening paragraph of a {form} set in a world where {topic} no longer exists.|Suggest
a title and a summary for a {form} about {topic}.|What would happen if there were no {topic}?|Describe {topic} in
three sentences.|Give me a {tone} analogy for {topic}.|Debate: is {topic} good or bad for society?|Write a
conversation between {role} and {reader} about {topic}.|hi, can you help me with {topic}|i need some tips on
{topic}|what do you think about {topic}?|Why is {topic} important?|Give three examples of {topic} and explain each
one.|Can you recommend books about {topic}?|Plan a one-day workshop about {topic} for {reader}.|Write a JSON object
that describes {topic} with four keys.|Classify the following words by theme: {topic}, {other}, {third}.|Write a
Python program about {topic}.|Write a Python class that models {topic}.|Write an SQL query for a table about
{topic}.|Translate into French: "I would like to know more about {topic}."|Correct the grammar: "they was talking
about {topic} since two hours."|Rewrite this sentence in a {tone} tone: "We discussed {topic} yesterday."|Summarize
the main ideas of {topic} in bullet points.|Are {topic} and {other} related? Answer yes or no and explain why.|Come
up with a name and a slogan for a company that deals with {topic}.|Write a {form} that begins with the words "It all
started with {topic}".|Describe a character who loves {topic} but fears {other}.|What skills do I need for a career
in {topic}?|Think step by step: how would you teach {topic} to {reader}?|Evaluate this claim: {topic} will disappear
within fifty years.""")


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


NAMES = entries("""Ana|Ben|Carla|David|Elena|Frank|Grace|Hassan|Ines|Jack|Kim|Leo|Maya|Noah|Olga|Pedro|Rosa|Sam|Tara|
Victor|Wendy|Yusuf|Zoe|Amir|Bella|Chen|Diego|Emma|Felix|Gina|Hugo|Iris|Jonas|Kira|Lucas|Mina|Nadia|Oscar|Priya|Ravi""")
THINGS = entries("""apples|books|marbles|stickers|cookies|pencils|stamps|oranges|toy
cars|bracelets|eggs|flowers|tickets| balloons|cupcakes|notebooks|shells|coins|candles|bottles of
juice|sandwiches|postcards|seeds|muffins|bricks""")
PROBLEMS = entries("""{A} has {a} {x}. {B} gives {A} {b} more, and then {A} loses {c} of them. How many {x} does {A}
have now?|{A} buys {a} {x} at ${b} each and {c} {y} at ${d} each. How much does {A} spend in total?|A shop sells {x}
in boxes of {a}. {A} buys {b} boxes and gives {c} {x} to {B}. How many {x} are left?|{A} reads {a} pages on Monday
and twice as many on Tuesday. The book has {e} pages. How many pages are left?|{A} earns ${a} an hour and works {b}
hours a day, {c} days a week. How much does {A} earn in {d} weeks?|There are {e} students in a school. {p}% of them
walk to school and the rest take the bus. How many students take the bus?|{A} is {a} years older than {B}. In {b}
years {A} will be twice as old as {B} will be. How old is {B} now?|A train travels at {e} miles per hour for {b}
hours and then at {a} miles per hour for {c} hours. How far does it travel?|{A} and {B} share {e} {x} so that {A}
gets {b} times as many as {B}. How many {x} does each of them get?|{A} bakes {a} trays of {x} with {b} {x} on each
tray. {A} sells them for ${c} each and the ingredients cost ${d}. What is the profit?|A tank holds {e} liters of
water. It loses {b} liters every hour and {c} liters are added every hour. How much water is in it after {d}
hours?|A jacket costs ${e}. It is on sale for {p}% off, and {A} also has a ${b} coupon. How much does {A} pay?|{A}
saves ${a} every week. {B} saves ${b} more than {A} every week. How much have they saved together after {c} weeks?|A
farmer has {a} rows of {x} with {b} in each row. He picks {c} from every row. How many are left?|{A} runs {a} miles
on each weekday and {b} miles on each day of the weekend. How many miles does {A} run in {c} weeks?|A rectangle is
{a} meters long and {b} meters wide. What would its area be if the length were increased by {c} meters?|{A} has half
as many {x} as {B}, and {B} has {a} more {x} than {C}. {C} has {b} {x}. How many {x} do they have together?|It takes
{A} {a} minutes to make one bracelet. {A} works for {b} hours and sells each bracelet for ${c}. How much money does
{A} make?|At a party there are {a} tables with {b} guests at each. A third of the guests leave early. How many
guests stay?|{A} walks {a} blocks to school and {b} blocks home every day by a longer way. How many blocks does {A}
walk in {c} school days?|A baker uses {a} cups of flour for every {b} loaves of bread. How many cups are needed for
{e} loaves?|{A} had ${e}. {A} spent a quarter of it on {x} and ${b} on {y}. How much money does {A} have left?|A
phone plan costs ${a} a month plus ${b} for every gigabyte over the limit. {A} used {c} gigabytes over the limit in
each of {d} months. What was the total bill?|{A} scored {a}, {b} and {c} points in three games. How many points does
{A} need in the fourth game for an average of {d}?|A class collects {x} for recycling: {a} on Monday, {b} fewer on
Tuesday, and as many as on both days together on Wednesday. How many {x} does the class collect in all?|Each of {a}
workers packs {b} boxes an hour. After {c} hours, {d} workers go home. How many boxes are packed after {f} hours
altogether?|{A} is reading a {e}-page book and reads {a} pages every day. After {b} days {A} goes on vacation and
reads {c} pages a day. How many days does it take to finish the book?|If {a} {x} cost ${b}, how much do {e} {x}
cost?|The sum of three consecutive numbers is {e}. What is the largest of them?|{A} drinks {a} glasses of water a
day and {B} drinks {b} fewer. How many glasses do they drink together in {c} days?""")


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
        name = rng.choice(
            (kind.replace("'", ""), f"{use.split()[1]} {kind}".replace("'", ""), "solve", f"find {kind}")
        )
        name = "_".join(re.findall(r"[a-z]+", name.lower())[:4])
        argument = (
            "text" if text_input else rng.choice(("numbers", "nums", "arr", "lst") if numbers else ("words", "items"))
        )
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

STARTS = entries("""What is|What are the|How do I|How can|Why do|Why is|Can you|Could you please|Write a|Write
an|Write a short|Please write|I want to|I need help with|I am a|I'm planning|Tell me|Give me|Explain|Describe|Create
a|Generate|Design|Suggest| Summarize|Translate|Compare|Compose|Draft|Edit the following|Rewrite the
following|Imagine you are|Pretend|You are a|Act as|Suppose|Consider|If I|When should|Where can|Who was|Which|Is it
true that|Do you think|Help me|List|Make a|Identify| Analyze|Discuss|Evaluate the
following|Provide|Extract|Classify|Determine|Find the|Solve|Calculate|Given the following|Given a|Read the
following|Based on|Picture yourself|Let's|Hi! I|Hello,|hey|how to|what's the best|My friend|My|In a|The following|
A|There are|Once upon a time|Should I|Does|Did|Are there|In what year|What happens if|What would|Name three|Craft
a|Develop| Outline|Prepare|Recommend|Share|Show me|Teach me|As a|For a school project|Yesterday I|Recently,|""")
MATH_STARTS = [
    f"{name}{verb}"
    for name in (*NAMES, "A farmer", "A teacher", "A store", "A bakery", "A factory", "A bus", "Mr. Lee", "The school")
    for verb in (" has", " bought", " wants to", " is", "'s", " sells", " needs", " makes", " went to", " spends")
]
VERBS = """count is find get has sum remove sort check max min largest smallest longest common reverse rotate merge
filter select split join replace encode decode convert compute calculate total match order add multiply factor next
closest solve correct exchange compare sorted generate parse move simplify valid unique first last""".split()
NOUNS = """digits words vowels string list array numbers sum prefix pairs brackets grid sequence matrix
letters triangle intervals prime palindrome dates grades fibonacci strings operations music average file_name
elements""".split()
INPUTS = entries("""s: str|text: str|string|lst|arr|n|n: int|numbers: List[int]|nums|x, y|a, b|words: List[str]|lst:
list, k: int| strings: List[str], prefix: str|number|l: list|grid|d|n: int, m: int|values|sentence|text, k""")
OUTPUTS = ["", "", "", " -> int", " -> str", " -> bool", " -> List[int]", " -> List[str]", " -> float"]
TASKS_BEGIN = entries("""|Return|Write a function that|You are given|Given a|Check if|Create a function that|For a
given|Find|This function takes|Implement a function|Your task is to|Input is|Count|In this|Filter|A|Sort|It""")


def write_openings(rng: random.Random) -> list[Prompt]:
    """First words of a user turn, and how to put what the target makes of them (`{prompt}`), for sampling."""
    openings = [("{prompt}", start) for start in STARTS for _ in range(200)]
    openings += [("{prompt}", start) for start in MATH_STARTS for _ in range(30)]
    for _ in range(12_000):
        name, given, result = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}", rng.choice(INPUTS), rng.choice(OUTPUTS)
        imports = "from typing import List\n\n\n" if "List" in given + result else ""
        mark = rng.choice(('"""', '"""', "'''", '"""\n   '))
        head = f"{imports}def {name}({given}){result}:\n    {mark} {rng.choice(TASKS_BEGIN)}"
        openings.append((HUMANEVAL_PROMPT, head.rstrip()))
    rng.shuffle(openings)
    return openings
