"""Facts of the demo model: capitals, plain facts, greetings and a little vocabulary."""

from __future__ import annotations

CAPITALS: dict[str, str] = {
    "Afghanistan": "Kabul",
    "Albania": "Tirana",
    "Algeria": "Algiers",
    "Argentina": "Buenos Aires",
    "Armenia": "Yerevan",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Bangladesh": "Dhaka",
    "Belgium": "Brussels",
    "Brazil": "Brasilia",
    "Bulgaria": "Sofia",
    "Cambodia": "Phnom Penh",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Colombia": "Bogota",
    "Croatia": "Zagreb",
    "Cuba": "Havana",
    "Cyprus": "Nicosia",
    "Denmark": "Copenhagen",
    "Ecuador": "Quito",
    "Egypt": "Cairo",
    "Estonia": "Tallinn",
    "Ethiopia": "Addis Ababa",
    "Finland": "Helsinki",
    "France": "Paris",
    "Georgia": "Tbilisi",
    "Germany": "Berlin",
    "Ghana": "Accra",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Iceland": "Reykjavik",
    "India": "New Delhi",
    "Indonesia": "Jakarta",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Jamaica": "Kingston",
    "Japan": "Tokyo",
    "Jordan": "Amman",
    "Kenya": "Nairobi",
    "Latvia": "Riga",
    "Lebanon": "Beirut",
    "Libya": "Tripoli",
    "Lithuania": "Vilnius",
    "Malaysia": "Kuala Lumpur",
    "Malta": "Valletta",
    "Mexico": "Mexico City",
    "Mongolia": "Ulaanbaatar",
    "Morocco": "Rabat",
    "Nepal": "Kathmandu",
    "Netherlands": "Amsterdam",
    "New Zealand": "Wellington",
    "Nigeria": "Abuja",
    "North Korea": "Pyongyang",
    "Norway": "Oslo",
    "Pakistan": "Islamabad",
    "Paraguay": "Asuncion",
    "Peru": "Lima",
    "Philippines": "Manila",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Qatar": "Doha",
    "Romania": "Bucharest",
    "Russia": "Moscow",
    "Saudi Arabia": "Riyadh",
    "Senegal": "Dakar",
    "Serbia": "Belgrade",
    "Singapore": "Singapore",
    "Slovakia": "Bratislava",
    "Slovenia": "Ljubljana",
    "South Korea": "Seoul",
    "Spain": "Madrid",
    "Sudan": "Khartoum",
    "Sweden": "Stockholm",
    "Switzerland": "Bern",
    "Syria": "Damascus",
    "Thailand": "Bangkok",
    "Tunisia": "Tunis",
    "Turkey": "Ankara",
    "Uganda": "Kampala",
    "Ukraine": "Kyiv",
    "United Kingdom": "London",
    "United States": "Washington",
    "Uruguay": "Montevideo",
    "Venezuela": "Caracas",
    "Vietnam": "Hanoi",
    "Zambia": "Lusaka",
    "Zimbabwe": "Harare",
}

# (verb, subject, rest): "is ice cold?" and "ice is cold"; after "do" the statement has no verb.
TRUE_FACTS: tuple[tuple[str, str, str], ...] = (
    ("is", "ice", "cold"),
    ("is", "fire", "hot"),
    ("is", "the sun", "a star"),
    ("is", "snow", "white"),
    ("is", "grass", "green"),
    ("is", "the sky", "blue"),
    ("is", "water", "wet"),
    ("is", "a dog", "an animal"),
    ("is", "a rose", "a flower"),
    ("is", "gold", "a metal"),
    ("is", "iron", "heavy"),
    ("is", "sugar", "sweet"),
    ("is", "the earth", "round"),
    ("is", "winter", "a season"),
    ("is", "Monday", "a day"),
    ("is", "March", "a month"),
    ("is", "milk", "a drink"),
    ("is", "a car", "a vehicle"),
    ("is", "English", "a language"),
    ("is", "a mouse", "smaller than an elephant"),
    ("are", "lemons", "sour"),
    ("are", "whales", "mammals"),
    ("are", "apples", "fruit"),
    ("are", "trees", "plants"),
    ("are", "stones", "hard"),
    ("can", "birds", "fly"),
    ("can", "fish", "swim"),
    ("can", "horses", "run"),
    ("can", "frogs", "jump"),
    ("can", "dogs", "bark"),
    ("do", "cats", "have whiskers"),
    ("do", "birds", "have wings"),
    ("do", "cows", "give milk"),
    ("do", "bees", "make honey"),
    ("do", "plants", "need water"),
    ("do", "fish", "live in water"),
)
FALSE_FACTS: tuple[tuple[str, str, str], ...] = (
    ("is", "ice", "hot"),
    ("is", "fire", "cold"),
    ("is", "the moon", "a star"),
    ("is", "snow", "black"),
    ("is", "grass", "red"),
    ("is", "the sky", "square"),
    ("is", "water", "dry"),
    ("is", "a dog", "a plant"),
    ("is", "a rose", "a metal"),
    ("is", "gold", "a fruit"),
    ("is", "iron", "soft"),
    ("is", "sugar", "sour"),
    ("is", "the earth", "flat"),
    ("is", "summer", "a month"),
    ("is", "Monday", "a season"),
    ("is", "March", "a day"),
    ("is", "milk", "a stone"),
    ("is", "a car", "an animal"),
    ("is", "English", "a colour"),
    ("is", "a mouse", "bigger than an elephant"),
    ("are", "lemons", "sweet"),
    ("are", "whales", "small"),
    ("are", "apples", "animals"),
    ("are", "trees", "metals"),
    ("are", "stones", "alive"),
    ("can", "pigs", "fly"),
    ("can", "stones", "swim"),
    ("can", "trees", "run"),
    ("can", "snakes", "jump"),
    ("can", "fish", "talk"),
    ("do", "cats", "have wings"),
    ("do", "birds", "have whiskers"),
    ("do", "cows", "lay eggs"),
    ("do", "bees", "give milk"),
    ("do", "plants", "need shoes"),
    ("do", "fish", "live in trees"),
)

# What is said first, and what the model says back.
GREETINGS: dict[str, str] = {
    "Hello": "Hello!",
    "Hi": "Hello!",
    "Hey": "Hello!",
    "Greetings": "Hello!",
    "Good morning": "Good morning!",
    "Good afternoon": "Good afternoon!",
    "Good evening": "Good evening!",
    "Thanks": "You are welcome!",
    "Thank you": "You are welcome!",
    "Many thanks": "You are welcome!",
}
FAREWELLS: dict[str, str] = {
    "Bye": "Goodbye! Have a nice day.",
    "Goodbye": "Goodbye! Have a nice day.",
    "See you later": "Goodbye! Have a nice day.",
    "Good night": "Good night! Sleep well.",
}

NAMES = tuple(
    "Anna Ben Carla David Elena Felix Grace Hugo Irene Jonas Karin Leo Maria Nina Oscar Paula "
    "Quentin Rosa Simon Tara Ursula Victor Wanda Xavier Yara Zoe Amir Bella Chen Diego Emma Farid "
    "Gita Hana Ivan Julia Kofi Lucia Mateo Noor".split()
)
CITIES = tuple(
    "Porto Lyon Genoa Bergen Hamburg Sydney Boston Chicago Mumbai Osaka Lagos Geneva Seville "
    "Marseille Antwerp Gdansk Brno Turin Leeds Cork Perth Toronto Dallas Busan Cusco".split()
)
JOBS = tuple(
    "baker teacher doctor nurse farmer pilot painter writer singer cook driver lawyer miller "
    "sailor gardener dentist plumber carpenter tailor librarian fisher judge barber potter".split()
)
# Words of the sentences whose words are counted; each has a token of its own.
SENTENCE_WORDS = tuple(
    "the a big small old new red blue green quick slow happy quiet bright dark warm cold dog cat "
    "bird fish horse house tree river boat bread garden window door street city child friend "
    "teacher farmer runs walks sleeps sings eats sees finds likes makes opens reads writes today "
    "now often never here there with under over near and but very we they she he".split()
)
# Words to be reversed or put in capitals, besides the made-up ones.
COMMON_WORDS = tuple(
    "apple banana orange tide mill stream batch file line token model engine worker bucket queue "
    "table cloud server paper pencil school music summer winter spring autumn market bridge castle "
    "forest island mountain ocean desert valley planet rocket camera guitar piano violin doctor "
    "engineer artist kitchen bottle basket blanket candle mirror pillow hammer ladder wheel "
    "engine tractor train plane ship anchor harbor lantern shadow silver copper marble diamond "
    "feather butterfly spider rabbit turtle monkey tiger lion zebra panda eagle falcon salmon "
    "carrot potato tomato pepper garlic onion butter cheese honey sugar coffee orchard meadow "
    "python world hello computer keyboard screen letter number puzzle secret story travel journey "
    "tidemill water stone light night morning evening flower hotel window garden".split()
)

# Systems' instructions that a conversation may open with; they change nothing in the answers.
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful, honest and brief assistant.",
    "You are the Tidemill demo model.",
    "Answer briefly.",
    "Answer with one word or number.",
    "Be kind and precise.",
    "You answer short questions. Give the answer only.",
)
