CREATE OPERATOR {schema}.-> (FUNCTION = {schema}.json_part, LEFTARG = text, RIGHTARG = text);

CREATE OPERATOR {schema}.->> (FUNCTION = {schema}.json_extract, LEFTARG = text, RIGHTARG = text);
