"""Languages by code and by English name, as the Whisper family has them: ISO 639-1 where it can.

Off OpenAI's list for that family. `jw` is what its vocabulary calls Javanese, which ISO calls `jv`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_TABLE = (
    "en english,zh chinese,de german,es spanish,ru russian,ko korean,fr french,ja japanese,"
    "pt portuguese,tr turkish,pl polish,ca catalan,nl dutch,ar arabic,sv swedish,it italian,"
    "id indonesian,hi hindi,fi finnish,vi vietnamese,he hebrew,uk ukrainian,el greek,ms malay,"
    "cs czech,ro romanian,da danish,hu hungarian,ta tamil,no norwegian,th thai,ur urdu,"
    "hr croatian,bg bulgarian,lt lithuanian,la latin,mi maori,ml malayalam,cy welsh,sk slovak,"
    "te telugu,fa persian,lv latvian,bn bengali,sr serbian,az azerbaijani,sl slovenian,"
    "kn kannada,et estonian,mk macedonian,br breton,eu basque,is icelandic,hy armenian,"
    "ne nepali,mn mongolian,bs bosnian,kk kazakh,sq albanian,sw swahili,gl galician,mr marathi,"
    "pa punjabi,si sinhala,km khmer,sn shona,yo yoruba,so somali,af afrikaans,oc occitan,"
    "ka georgian,be belarusian,tg tajik,sd sindhi,gu gujarati,am amharic,yi yiddish,lo lao,"
    "uz uzbek,fo faroese,ht haitian creole,ps pashto,tk turkmen,nn nynorsk,mt maltese,"
    "sa sanskrit,lb luxembourgish,my myanmar,bo tibetan,tl tagalog,mg malagasy,as assamese,"
    "tt tatar,haw hawaiian,ln lingala,ha hausa,ba bashkir,jw javanese,su sundanese,yue cantonese"
)
_OTHER_NAMES = (
    "my burmese,ca valencian,nl flemish,ht haitian,lb letzeburgesch,ps pushto,pa panjabi,"
    "ro moldavian,ro moldovan,si sinhalese,es castilian,zh mandarin,jw jv"
)


def _pairs(table: str) -> list[tuple[str, str]]:
    return [(code, name) for code, _, name in (entry.partition(" ") for entry in table.split(","))]


LANGUAGES: Mapping[str, str] = MappingProxyType(dict(_pairs(_TABLE)))
"""The English name of each code."""

_CODES = {name: code for code, name in _pairs(_TABLE) + _pairs(_OTHER_NAMES)}

# Where words are not set apart by spaces.
UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})


def code_of(language: str) -> str | None:
    """Return the code of a language that is called by its code or a name, in any case."""
    called = language.strip().lower()
    return called if called in LANGUAGES else _CODES.get(called)
