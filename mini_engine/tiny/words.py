"""The words that ``corpus.py`` writes with: names, things and the plots of its stories.

A plot is a list of beats; each beat is a choice of sentences whose slots ``Cast.slots`` fills:
``n`` hero, ``a`` animal, ``f`` friend, ``b`` the friend's animal, ``o`` a thing, ``p`` the place, ``an_…`` with its
article, ``he``/``his``/``him`` pronouns of the hero.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plot:
    """A story line: ``idea`` finishes the sentence "In the story, …"; ``beats`` are told in order, one choice each."""

    idea: str
    beats: tuple[tuple[str, ...], ...]


NAMES = tuple(
    "Ada Alma Amir Anna Aria Asha Ben Bella Bruno Carla Cleo Clara Dana David Dora Elena Eli Ella Emil Emma Eva Felix "
    "Fiona Freya George Gina Grace Hana Hugo Ida Ines Iris Ivan Jack Jana Jonas Julia Kai Kira Lara Lea Leo Lily Lina "
    "Lucas Lucy Luna Maja Marco Maria Max Mia Mila Milo Mina Nadia Nico Nina Noah Nora Olga Oscar Otto Paul Petra Pia "
    "Rosa Ruth Sam Sara Simon Sofia Stella Tara Theo Tim Tina Tom Uma Vera Victor Wanda Yara Yuki Zara Zoe".split()
)

SYLLABLE_STARTS = tuple("b d f g h j k l m n p r s t v z br tr kr sh dr fl gr st th w y".split())
VOWELS = tuple("a e i o u a e i o ai ee oo".split())
SYLLABLE_ENDS = ("", "", "", "n", "l", "r", "s", "m", "k", "x")

ANIMALS = tuple(
    "fox owl bear cat dog frog mouse rabbit hedgehog otter duck goose wolf deer badger squirrel turtle bee crow donkey "
    "goat horse lion monkey panda penguin pig seal sheep snail spider swan tiger whale zebra lizard".split()
)

ADJECTIVES = tuple(
    "small shy brave clever curious gentle happy hungry kind lazy little lonely merry old playful proud quick quiet "
    "silly sleepy strong tiny wise young busy cheerful".split()
)

COLORS = tuple("red blue green yellow orange purple brown black white pink gray golden silver".split())

OBJECTS = tuple(
    "ball kite boat hat book cup lamp drum bell key box bag scarf coat spoon chair clock flute map ring stone "
    "basket blanket button candle ladder umbrella bike cart mirror".split()
)

PLACES = (
    "the forest",
    "a quiet valley",
    "a big garden",
    "an old barn",
    "a village by the sea",
    "the mountains",
    "a meadow",
    "a house on a hill",
    "the north",
    "a small town",
    "a cave near the river",
    "an apple orchard",
    "a tree house",
    "a farm",
    "a green park",
    "the reeds by the lake",
)

CITIES = tuple(
    "Oslo Paris Rome Berlin Madrid Lisbon Vienna Prague Dublin Athens Cairo Lima Quito Tokyo Osaka Seoul Delhi Mumbai "
    "Nairobi Lagos Accra Boston Chicago Denver Toronto Sydney Perth Geneva Zurich Milan Turin Porto Krakow Riga".split()
)

JOBS = tuple(
    "baker teacher doctor farmer pilot nurse painter singer writer cook driver gardener builder sailor dancer tailor "
    "judge dentist plumber poet".split()
)

FOODS = tuple(
    "apples bread cheese soup rice pasta plums honey nuts berries cake salad beans carrots noodles pancakes pears "
    "cherries potatoes olives".split()
)

GREETINGS = (
    ("Hello!", "Hello! What would you like to hear?"),
    ("Hi", "Hi! I can tell you a story."),
    ("Good morning!", "Good morning! How can I help you?"),
    ("Who are you?", "I am a tiny language model. I can tell stories, write records and answer small questions."),
    ("What can you do?", "I can tell stories about animals, write JSON records and remember who has what."),
    ("What is your name?", "I have no name. I am a tiny language model."),
    ("How are you?", "I am well, thank you! How can I help you?"),
    ("Thank you!", "You are welcome!"),
    ("Goodbye!", "Goodbye! Come back soon."),
)

PLOTS = (
    Plot(
        "{n} loses {an_o} and finds it again",
        (
            (
                "One morning {n} could not find {his} {o}.",
                "{n} had {an_o}. One day it was gone.",
                "{n} loved {his} {o} very much. But one evening {he} lost it.",
            ),
            (
                "{He} looked under the bed and behind the door, but it was not there.",
                "{He} looked everywhere and found nothing.",
                "{n} sat down and felt sad.",
            ),
            (
                'Then {f} the {b} came by. "What is wrong?" asked {f}.',
                '{An_b} named {f} heard {him} cry. "Can I help?" asked {f}.',
                "{n} asked {his} friend {f}, {an_b}, for help.",
            ),
            (
                '"I lost my {o}," said {n}. They searched together until the sun went down.',
                "Together {n} and {f} walked back along the path and looked at every stone.",
                '{f} had an idea. "Where did you see it last?"',
            ),
            (
                "At last they found the {o} under a bush.",
                "The {o} was in the tall grass, and it was not even wet.",
                "And there it was! The {o} had been in the kitchen all the time.",
            ),
            (
                "{n} the {a} was so happy that {he} hugged {f}.",
                '"Thank you, {f}!" said {n}. From that day they were good friends.',
                "That night {n} slept well, with the {o} beside {him}.",
            ),
        ),
    ),
    Plot(
        "{n} and {f} wait for the end of a storm",
        (
            (
                "One day a big storm came to {p}.",
                "One night the wind began to blow and the rain came down.",
                "In autumn dark clouds came over the hills.",
            ),
            (
                "{n} was afraid of the thunder.",
                "The little home of {n} began to shake.",
                "The {a} ran home as fast as {he} could.",
            ),
            (
                "There was a knock at the door. It was {f} the {b}, wet and cold.",
                "On the way {he} met {f}, {an_b} with no place to go.",
                'Outside {he} heard a voice. "Please let me in," called {f} the {b}.',
            ),
            (
                '"Come in and sit by the fire," said {n}.',
                "{n} opened the door and gave {f} a warm blanket.",
                '"You can stay here," said {n} the {a}.',
            ),
            (
                "They drank tea and told each other stories.",
                "They counted the seconds after each flash and soon nobody was afraid.",
                "They sang songs until the thunder went away.",
            ),
            (
                "In the morning the sky was blue, and {n} had a new friend.",
                "When the sun came back, {f} thanked {n} and they went out to play.",
                "After that night {n} was never afraid of storms again.",
            ),
        ),
    ),
    Plot(
        "{n} plants a seed and learns to wait",
        (
            (
                "In spring {n} found a seed on the path.",
                "One day {f} the {b} gave {n} a small seed.",
                "{n} wanted to grow the biggest flower in {p}.",
            ),
            (
                "{He} put it in the ground and gave it water.",
                "{n} made a hole in the soft earth and put the seed in.",
                "The {a} planted it near {his} door.",
            ),
            (
                "The next day nothing had happened. {n} was sad.",
                "{n} looked at the ground every hour, but nothing came up.",
                "Days went by and {n} could not wait any longer.",
            ),
            (
                '"You must wait," said {f} the {b}. "Good things take time."',
                '"Be patient," said {his} friend {f}, who was {an_b}.',
                '{f} the {b} laughed. "A seed does not look at the clock."',
            ),
            (
                "So {n} waited. The sun was warm and the rain was soft.",
                "{n} sang to the seed each morning and gave it water each night.",
                "{He} played with {his} {o} and tried to think of other things.",
            ),
            (
                'One morning there was a tall yellow flower. "It was worth it," said {n}.',
                "At last a green leaf came up, and {n} danced with joy.",
                "In summer there was a flower as tall as {n} the {a}.",
            ),
        ),
    ),
    Plot(
        "{n} runs a race against {f}",
        (
            (
                "Every year there was a race around the lake.",
                '"I am faster than you," said {f} the {b} one day.',
                "{n} wanted to win the great race.",
            ),
            (
                "{n} trained every day before breakfast.",
                "Nobody thought that {an_a} could win.",
                "All the animals came to watch {n} and {f}.",
            ),
            (
                "When the bell rang, {f} the {b} ran ahead.",
                "At first {f}, {an_b}, was far in front.",
                "The race began, and {n} ran as fast as {he} could.",
            ),
            (
                "Halfway around, {f} fell and hurt a foot.",
                "Then {f} stopped, because a stone was in the way.",
                "But near the old tree {f} slipped in the mud.",
            ),
            (
                "{n} could win now, but {he} stopped and helped {f}.",
                '"Are you all right?" asked {n}, and turned back.',
                '{n} did not run past. "Lean on me," {he} said.',
            ),
            (
                "They crossed the line together, and everyone cheered.",
                "Nobody won that day, but {n} the {a} got {an_o} for {his} kind heart.",
                '"A friend is better than a prize," said {n}.',
            ),
        ),
    ),
    Plot(
        "{n} gives a birthday present to {f}",
        (
            (
                "It was the birthday of {f} the {b}.",
                "Tomorrow was a big day. {n}'s friend {f}, {an_b}, had a birthday.",
                "{n} was invited to the birthday of {f} the {b}.",
            ),
            (
                "{n} wanted to give {f} a present, but {he} had no money.",
                '"What can I give?" thought {n}.',
                "The {a} looked in every shop but found nothing good.",
            ),
            (
                "So {n} took some wood and began to work.",
                "Then {he} saw {an_o} at home, and had an idea.",
                "{n} thought all night long.",
            ),
            (
                "{He} cleaned the {o} until it was bright.",
                "By morning {he} had made {an_o}.",
                "At last {he} wrapped {his} own {o} in paper.",
            ),
            (
                "At the party there was cake, and all the animals sang.",
                "{f} opened the present slowly.",
                "When {n} came to the party, {he} was a little shy.",
            ),
            (
                '"This is the best present of all," said {f}.',
                '{f} smiled and hugged {n}. "I will always keep this {o}."',
                "{f} loved the {o}, and {n} the {a} was proud.",
            ),
        ),
    ),
    Plot(
        "{n} is afraid of the dark",
        (
            (
                "{n} had one secret. {He} was afraid of the dark.",
                "Every night, when the lamp went out, {n} could not sleep.",
                "{n} did not like the night.",
            ),
            (
                "The trees looked like giants, and the wind made strange sounds.",
                '"There is something under my bed," {he} thought.',
                "{He} hid under {his} blanket and held {his} {o}.",
            ),
            (
                "One night {he} heard a soft voice at the window. It was {f} the {b}.",
                "{An_b} named {f} saw the light in the window and came in.",
                "So {he} went to ask {f}, a wise old {b}.",
            ),
            (
                '"Come outside," said {f}. "I want to show you something."',
                '"The dark is only the day with its eyes closed," said {f}.',
                '"Take my hand," said {f}, "and look up."',
            ),
            (
                "They sat on a rock and saw a thousand stars.",
                "{n} looked up. The moon was round and bright.",
                "In the dark there were little lights that danced over the grass.",
            ),
            (
                '"Without the dark I would not see them," said {n}.',
                "From then on {n} the {a} loved the night.",
                "That night {n} slept without a lamp.",
            ),
        ),
    ),
    Plot(
        "{n} helps {f} to cross the river",
        (
            (
                "One day {n} went for a walk and came to a wide river.",
                "{n} liked to sit by the river and watch the water.",
                "After a long rain the river was high.",
            ),
            (
                "On the other side stood {f}, {an_b}, who wanted to go home.",
                "There {he} met {f} the {b}, who could not swim.",
                "A voice called for help. It was {f} the {b}, and the bridge was gone.",
            ),
            (
                '"Do not worry," called {n}. "I will find a way."',
                "{n} thought hard.",
                '"I am only {an_a}," said {n}, "but I will try."',
            ),
            (
                "{He} pushed a fallen tree until it lay across the water.",
                "{He} tied a rope to a rock and threw it over.",
                "{n} built a small boat out of branches.",
            ),
            (
                "Step by step {f} came across.",
                '{f} was afraid, but {n} said, "Look at me and not at the water."',
                "The water was loud and fast, but they did not give up.",
            ),
            (
                '"You are the bravest {a} I know," said {f}.',
                "{f} gave {n} {an_o} to say thank you.",
                "Since that day {n} and {f} meet at the river every week.",
            ),
        ),
    ),
    Plot(
        "{n} finds {an_o} and looks for its owner",
        (
            (
                "One day {n} found {an_o} on the road.",
                "Under a tree {n} saw something bright. It was {an_o}.",
                "{n} was on {his} way home when {he} stepped on {an_o}.",
            ),
            (
                '"I would like to keep it," {he} thought, "but it is not mine."',
                "It was very pretty, and nobody was there.",
                '"Somebody must miss this {o}," said {n}.',
            ),
            (
                "{He} asked everyone in {p}.",
                "{n} went from door to door.",
                "The {a} walked all day and asked everyone {he} met.",
            ),
            (
                "In the evening {he} came to the house of {f} the {b}.",
                "Then {he} saw {f}, {an_b}, who looked at the ground and sighed.",
                "At the market {he} heard that {f} the {b} had lost something.",
            ),
            (
                '"Is this yours?" asked {n}. "My {o}!" cried {f}.',
                "{f} saw the {o} and jumped up and down.",
                '"I have looked for this {o} all week," said {f}.',
            ),
            (
                "They had soup together, and {n} went home with a warm heart.",
                '"You are an honest {a}," said {f}. {n} smiled all the way home.',
                "And so {n} lost {an_o} and found a friend.",
            ),
        ),
    ),
    Plot(
        "{n} makes music with {f}",
        (
            (
                "{n} loved music, but {he} thought {he} could not sing.",
                "All day long {n} made little sounds with {his} {o}.",
                "There was going to be a concert, and {n} wanted to play.",
            ),
            (
                "The others laughed at {him}.",
                '"That is too loud," said the neighbors.',
                "Each time {he} tried, {he} became shy and stopped.",
            ),
            (
                "Only {f} the {b} listened.",
                "{An_b} named {f} stopped at the fence and listened.",
                "But {f}, {an_b}, liked what {he} heard.",
            ),
            (
                '"Play it again," said {f}, "and I will dance."',
                '"Let us do it together," said {f}.',
                "{f} began to clap, slowly at first and then faster.",
            ),
            (
                "They practiced every evening until the stars came out.",
                "Soon {n} forgot to be shy.",
                "They made a song about {p}.",
            ),
            (
                "At the concert everyone clapped for {n} the {a} and {f} the {b}.",
                "Now the neighbors open their windows when {n} plays.",
                '"I can sing after all," said {n}.',
            ),
        ),
    ),
    Plot(
        "{n} shares {his} lunch",
        (
            (
                "One day {n} took a walk with a basket full of bread and berries.",
                "{n} was very hungry after a long morning.",
                "It was a hot day, and {n} sat down to eat.",
            ),
            (
                "{He} was just about to eat when {he} saw {f} the {b}.",
                "Beside the road sat {f}, {an_b}, who looked tired.",
                "Then {an_b} named {f} came along the path.",
            ),
            (
                '"I have not eaten since yesterday," said {f}.',
                "{f} looked at the food and said nothing.",
                '"That smells good," said {f} in a small voice.',
            ),
            (
                "{n} looked at {his} lunch. It was not much.",
                "First {n} wanted to eat it all alone.",
                "The {a} thought for a moment.",
            ),
            (
                "Then {he} cut the bread in two and gave one half to {f}.",
                '"Sit down," said {n}. "There is enough for two."',
                '"Half is for you," {he} said.',
            ),
            (
                "It was the best lunch {n} ever had.",
                "The next day {f} brought {n} a cake and {an_o}.",
                "Food tastes better with a friend, thought {n} the {a}.",
            ),
        ),
    ),
)
