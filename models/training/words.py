"""Captions: what people may write when they mean a picture."""

import random
import re
from collections import Counter

import colours

# Everyday words for things that Unicode names otherwise. Also the list of things that are asked for most often.
SYNONYMS = {
    "automobile": ["car", "car", "red car"], "oncoming automobile": ["car from the front"], "racing car": ["race car", "sports car", "formula one car"],
    "sport utility vehicle": ["suv", "jeep", "off-road car"], "pickup truck": ["pickup"], "delivery truck": ["truck", "van", "lorry"], "articulated lorry": ["semi truck"],
    "fire engine": ["fire truck"], "police car": ["cop car"], "taxi": ["cab", "taxi cab"], "bus": ["school bus"], "locomotive": ["steam train", "steam engine"],
    "high-speed train": ["fast train"], "bicycle": ["bike"], "motorcycle": ["motorbike"], "motor scooter": ["scooter", "vespa"], "airplane": ["plane", "jet", "aeroplane"],
    "sailboat": ["sailing boat", "boat", "yacht", "boat with sails"], "ship": ["big ship"], "passenger ship": ["cruise ship"], "speedboat": ["fast boat"],
    "rocket": ["space rocket", "spaceship", "rocket ship"], "flying saucer": ["ufo", "alien ship"], "helicopter": ["chopper"], "satellite": ["space satellite"],
    "house": ["home", "small house"], "house with garden": ["home with garden", "house with a tree"], "castle": ["fairy tale castle"], "office building": ["skyscraper"],
    "church": ["chapel"], "tent": ["camping tent"], "mountain": ["big mountain"], "snow-capped mountain": ["snowy mountain"], "volcano": ["erupting volcano"],
    "sun": ["sunshine"], "sun with face": ["smiling sun"], "star": ["gold star"], "glowing star": ["shining star"], "crescent moon": ["moon"], "full moon": ["round moon"],
    "cloud": ["white cloud"], "rainbow": ["rainbow arc"], "umbrella": ["open umbrella"], "fire": ["flame", "flames"], "snowman": ["snow man"], "snowflake": ["snow flake"],
    "high voltage": ["lightning", "lightning bolt"], "droplet": ["drop of water", "water drop"], "water wave": ["wave", "ocean wave"], "ringed planet": ["planet", "saturn"],
    "globe showing americas": ["earth", "globe", "planet earth"], "cat face": ["cat", "kitty", "kitten", "cat head"], "cat": ["sitting cat", "whole cat"],
    "dog face": ["dog", "puppy", "dog head"], "dog": ["whole dog", "standing dog"], "horse face": ["horse head"], "cow face": ["cow head"], "pig face": ["pig", "piggy"],
    "mouse face": ["mouse", "mouse head"], "rabbit face": ["rabbit", "bunny"], "tiger face": ["tiger head"], "monkey face": ["monkey", "monkey head"], "bear": ["bear face", "teddy"],
    "panda": ["panda face", "panda bear"], "fox": ["fox face"], "lion": ["lion face"], "frog": ["frog face"], "koala": ["koala bear"], "wolf": ["wolf face"],
    "hatching chick": ["chick in an egg"], "baby chick": ["chick"], "bird": ["small bird"], "owl": ["owl bird"], "penguin": ["little penguin"], "sauropod": ["dinosaur", "long neck dinosaur"],
    "t-rex": ["tyrannosaurus", "dinosaur"], "spouting whale": ["whale with water"], "tropical fish": ["colourful fish"], "lady beetle": ["ladybug", "ladybird"], "honeybee": ["bee"],
    "bug": ["caterpillar"], "blossom": ["flower", "yellow flower"], "rose": ["red rose", "red flower"], "tulip": ["pink tulip", "pink flower"], "bouquet": ["flowers", "bunch of flowers"],
    "evergreen tree": ["pine tree", "fir tree"], "deciduous tree": ["tree", "green tree"], "christmas tree": ["xmas tree"], "potted plant": ["plant in a pot"], "mushroom": ["toadstool", "red mushroom"],
    "red apple": ["apple", "apple fruit"], "green apple": ["apple that is green"], "tangerine": ["orange", "orange fruit", "mandarin"], "banana": ["bananas"], "lemon": ["lemon fruit"],
    "grapes": ["bunch of grapes"], "watermelon": ["slice of watermelon"], "cherries": ["cherry"], "strawberry": ["red strawberry"], "eggplant": ["aubergine"], "ear of corn": ["corn", "maize"],
    "hot pepper": ["chili", "chili pepper"], "bell pepper": ["pepper"], "potato": ["potatoes"], "bread": ["loaf of bread", "toast"], "cheese wedge": ["cheese", "piece of cheese"],
    "hamburger": ["burger", "cheeseburger"], "french fries": ["fries", "chips"], "pizza": ["slice of pizza", "pizza slice", "piece of pizza"], "hot dog": ["hotdog"],
    "cooking": ["fried egg", "egg in a pan"], "spaghetti": ["pasta", "noodles"], "steaming bowl": ["ramen", "noodle soup"], "sushi": ["nigiri"], "soft ice cream": ["ice cream cone", "soft serve"],
    "ice cream": ["ice cream cup", "bowl of ice cream"], "doughnut": ["donut", "pink donut"], "cookie": ["chocolate chip cookie", "biscuit"], "birthday cake": ["cake with candles", "cake"],
    "shortcake": ["slice of cake", "piece of cake"], "cupcake": ["muffin"], "chocolate bar": ["chocolate"], "lollipop": ["lolly"], "hot beverage": ["coffee", "cup of coffee", "cup of tea"],
    "beer mug": ["beer", "glass of beer"], "wine glass": ["wine", "glass of wine"], "cocktail glass": ["martini"], "glass of milk": ["milk"], "cup with straw": ["soda", "soft drink"],
    "fork and knife": ["cutlery"], "wrapped gift": ["gift", "present", "gift box"], "balloon": ["red balloon"], "party popper": ["confetti"], "soccer ball": ["football", "ball"],
    "american football": ["rugby ball"], "tennis": ["tennis ball"], "pool 8 ball": ["eight ball", "billiard ball"], "trophy": ["gold cup", "winner's cup"], "video game": ["game controller", "gamepad"],
    "game die": ["dice"], "puzzle piece": ["jigsaw piece"], "teddy bear": ["plush bear", "toy bear"], "artist palette": ["paint palette"], "kite": ["flying kite"], "jack-o-lantern": ["halloween pumpkin", "pumpkin"],
    "t-shirt": ["shirt", "tee shirt"], "jeans": ["trousers", "pants"], "running shoe": ["sneaker", "sneakers"], "high-heeled shoe": ["high heels"], "billed cap": ["cap", "baseball cap"],
    "top hat": ["hat", "magician's hat"], "crown": ["gold crown", "king's crown"], "gem stone": ["diamond", "gem"], "ring": ["diamond ring"], "backpack": ["school bag", "rucksack"],
    "guitar": ["acoustic guitar"], "musical keyboard": ["piano"], "drum": ["drums"], "headphone": ["headphones"], "mobile phone": ["phone", "smartphone", "cell phone"], "telephone": ["old phone"],
    "laptop": ["laptop computer", "notebook computer"], "desktop computer": ["computer", "pc"], "television": ["tv", "television set"], "camera": ["photo camera"], "light bulb": ["bulb", "lamp"],
    "magnifying glass tilted left": ["magnifying glass"], "books": ["stack of books"], "open book": ["book"], "closed book": ["red book"], "envelope": ["letter"], "pencil": ["yellow pencil"], "locked": ["lock", "padlock"],
    "key": ["golden key"], "hammer": ["tool hammer"], "bomb": ["round bomb"], "crossed swords": ["swords"], "alarm clock": ["clock"], "watch": ["wrist watch"], "hourglass done": ["hourglass"],
    "candle": ["burning candle"], "door": ["brown door"], "chair": ["wooden chair"], "couch and lamp": ["sofa", "couch"], "bed": ["bedroom bed"], "shopping cart": ["trolley"], "microscope": ["lab microscope"],
    "grinning face": ["happy face", "smiley", "smiling face", "smile"], "smiling face with sunglasses": ["face with sunglasses", "cool face", "face wearing sunglasses", "sunglasses face"],
    "crying face": ["sad crying face", "face with a tear", "crying"], "loudly crying face": ["sobbing face"], "face with tears of joy": ["laughing face", "laughing crying face"],
    "smiling face with heart-eyes": ["face with heart eyes", "love face", "heart eyes"], "enraged face": ["red angry face", "very angry face"], "angry face": ["mad face"], "winking face": ["wink"],
    "thinking face": ["thinking", "hmm face"], "sleeping face": ["sleepy face", "face asleep"], "face screaming in fear": ["scared face", "screaming face"], "partying face": ["party face"],
    "slightly frowning face": ["sad face"], "nerd face": ["face with glasses"], "exploding head": ["mind blown"], "pile of poo": ["poop", "poo"], "skull": ["skeleton head"], "ghost": ["white ghost"],
    "alien": ["alien head", "grey alien"], "alien monster": ["space invader", "purple monster"], "robot": ["robot head", "robot face"], "clown face": ["clown"], "grinning cat": ["happy cat face", "grinning cat face", "smiling cat"],
    "smiling cat with heart-eyes": ["cat face with heart eyes"], "pouting cat": ["angry cat face", "angry cat"], "crying cat": ["crying cat face", "sad cat"], "red heart": ["heart", "love heart"],
    "broken heart": ["heart broken in two"], "hundred points": ["100"], "collision": ["explosion", "boom"], "thumbs up": ["thumb up", "like"], "waving hand": ["hand waving", "hello hand"], "clapping hands": ["applause"],
    "flexed biceps": ["strong arm", "muscle"], "eye": ["single eye"], "mouth": ["red lips"], "footprints": ["foot prints"], "person": ["human"], "baby": ["baby face"], "santa claus": ["santa", "father christmas"],
    "ninja": ["ninja warrior"], "mermaid": ["sea maiden"], "unicorn": ["unicorn head"], "dragon": ["green dragon"], "dragon face": ["dragon head"], "octopus": ["pink octopus"], "sunflower": ["sun flower"],
}
TEMPLATES = [
    "{} emoji", "an emoji of {}", "emoji of {}", "a picture of {}", "an image of {}", "{} icon", "a 3d icon of {}", "3d {}", "a cute {}", "{}, 3d render", "{}, white background", "{}, emoji, 3d icon",
    "a drawing of {}", "one {}", "my {}", "this is {}", "draw {}", "a photo of {}",
]
GROUPS_TO_PAINT = {"Smileys & Emotion", "Animals & Nature", "Food & Drink", "Travel & Places", "Activities", "Objects"}


def may_be_painted(entry: dict) -> bool:
    """Whether "a blue one" makes sense: not for people, flags and signs."""
    return entry["group"] in GROUPS_TO_PAINT and not entry["tone"]


def with_article(noun: str, rng: random.Random) -> str:
    if rng.random() < 0.2:
        return "the " + noun
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def rare_words(captions: dict) -> dict[str, list[str]]:
    """File -> its words that mean at most two things: they name it nearly as well as its name does."""
    counts = Counter()
    for entry in {c["name"]: c for c in captions.values()}.values():
        counts.update(entry["words"])
    plain = re.compile(r"[a-z][a-z ]{2,}")
    return {
        file: [w for w in c["words"] if counts[w] <= 2 and plain.fullmatch(w) and not colours.WORDS & set(w.split())]
        for file, c in captions.items()
    }


def without_colour(name: str) -> str:
    return " ".join(w for w in name.split() if w not in colours.WORDS)


def colour_word(colour: str, rng: random.Random) -> str:
    return rng.choice(colours.ALIASES.get(colour, [colour]))


class Caption:
    """Draws captions for one picture."""

    def __init__(self, entry: dict, rare: list[str], own_colour: str | None):
        self.name = entry["name"]
        self.tone = entry["tone"] and f"{entry['tone']} skin tone"
        self.words = entry["words"]
        self.synonyms = SYNONYMS.get(self.name, [])
        self.rare = rare
        # A name that says a colour says the right one.
        self.colour = None if colours.WORDS & set(self.name.split()) else own_colour

    def noun(self, rng: random.Random) -> str:
        r = rng.random()
        if r < 0.3 and self.synonyms:
            return rng.choice(self.synonyms)
        if r < 0.4 and self.rare:
            return rng.choice(self.rare)
        words = self.name.split()
        if 0.4 <= r < 0.46 and len(words) > 2 and words[1] != "and":
            return " ".join(words[1:])
        return self.name

    def draw(self, rng: random.Random) -> str:
        r = rng.random()
        if r < 0.1:
            return ""
        if r < 0.16 and self.words:
            return rng.choice([" ", ", "]).join(rng.sample(self.words, min(len(self.words), rng.randint(1, 4))))
        noun = self.noun(rng)
        if self.tone and rng.random() < 0.9:
            noun = f"{noun} {self.tone}" if rng.random() < 0.7 else f"{noun} with {self.tone}"
        if self.colour and r < 0.3:
            return painted_caption(noun, self.colour, rng)
        if r < 0.6:
            return noun
        if r < 0.76:
            return with_article(noun, rng)
        if r < 0.87 and self.words:
            return noun + ", " + ", ".join(rng.sample(self.words, min(len(self.words), rng.randint(1, 3))))
        if r < 0.96:
            return rng.choice(TEMPLATES).format(with_article(noun, rng) if rng.random() < 0.5 else noun)
        words = noun.split()
        rng.shuffle(words)
        return " ".join(words)


def painted_caption(noun: str, colour: str, rng: random.Random) -> str:
    """One that says the colour, in one of several places."""
    noun = without_colour(noun) or noun
    word = colour_word(colour, rng)
    r = rng.random()
    words = noun.split()
    if r < 0.35:
        return f"{word} {noun}"
    if r < 0.65:
        return with_article(f"{word} {noun}", rng)
    if r < 0.75 and len(words) > 1 and not {"with", "of", "and", "in", "on", "from"} & set(words):
        return " ".join([*words[:-1], word, words[-1]])
    if r < 0.82:
        return f"{noun}, {word}"
    if r < 0.88:
        return with_article(noun, rng) + f" in {word}"
    if r < 0.94:
        return rng.choice(TEMPLATES).format(f"{word} {noun}")
    return f"{word} colored {noun}"


class PaintedCaption(Caption):
    """Draws captions for one picture that was repainted: nearly all say the colour."""

    def __init__(self, entry: dict, rare: list[str], paint: str):
        super().__init__(entry, rare, None)
        self.paint = paint

    def draw(self, rng: random.Random) -> str:
        if rng.random() < 0.1:
            return ""
        r = rng.random()
        noun = rng.choice(self.synonyms) if r < 0.4 and self.synonyms else self.name
        return painted_caption(noun, self.paint, rng)
