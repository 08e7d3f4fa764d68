-- What SQLite calls by these names, for PostgreSQL: so that the kernel's statements are one text for both. `{schema}` is the
-- record's. JSON stays text; what PostgreSQL cannot have in a text, U+0000, is read as U+E0F0 where a value is taken out of
-- JSON, and stands unchanged where a part of the JSON is.

CREATE OR REPLACE FUNCTION {schema}.json_path(path text) RETURNS text[]
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT string_to_array(replace(replace(substr(path, 3), '[', '.'), ']', ''), '.')
$$;

CREATE OR REPLACE FUNCTION {schema}.json_read(body text) RETURNS json
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT (CASE WHEN position('\u0000' IN body) = 0 THEN body
            ELSE regexp_replace(body, '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ue0f0', 'g') END)::json
$$;

CREATE OR REPLACE FUNCTION {schema}.json_part(body text, path text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT replace(({schema}.json_read(body) #> {schema}.json_path(path))::text, '\ue0f0', '\u0000')
$$;

CREATE OR REPLACE FUNCTION {schema}.json_extract(body text, path text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT CASE part WHEN 'true' THEN '1' WHEN 'false' THEN '0' ELSE part::json #>> '{{}}' END
    FROM (SELECT ({schema}.json_read(body) #> {schema}.json_path(path))::text AS part) AS parts
$$;

CREATE OR REPLACE FUNCTION {schema}.json_type(body text, path text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT CASE kind WHEN 'string' THEN 'text' WHEN 'boolean' THEN part::text
                     WHEN 'number' THEN CASE WHEN part::text ~ '[.eE]' THEN 'real' ELSE 'integer' END ELSE kind END
    FROM (SELECT part, json_typeof(part) AS kind
          FROM (SELECT {schema}.json_read(body) #> {schema}.json_path(path) AS part) AS parts) AS kinds
$$;

CREATE OR REPLACE FUNCTION {schema}.json_valid(body text) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
BEGIN
    PERFORM body::json;
    RETURN TRUE;
EXCEPTION WHEN OTHERS THEN
    RETURN FALSE;
END
$$;

CREATE OR REPLACE FUNCTION {schema}.instr(body text, part text) RETURNS bigint
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT position(part IN body)::bigint
$$;
