"""Templates that use one feature each: what real templates use, and what lies next to it."""

EXPRESSIONS = """
'a' + 'b' ~ 1 + 2
'a' ~ 1 ~ true ~ none ~ undefined_name ~ 1.5 ~ [1, 'x'] ~ {'k': none}
1 + 2 * 3 - 4 / 2
7 // 2
-7 // 2
7 % 3
-7 % 3
7.5 % 2
2 ** 10
2 ** -1
2 ** 3 ** 2
-2 ** 2
- 3 | abs
1 / 2
4 / 2
123456789012345678
0.0001
1.0
0.1 + 0.2
100000.0 * 10000000000
1_000
0x1F
1 < 2 < 3
3 > 2 > 2
1 == 1.0
1 == true
'a' == "a"
'a' != none
'a' < 'b'
[1, 2] < [1, 3]
[1, 2] == [1, 2]
(1, 2) == [1, 2]
{'a': 1} == {'a': 1}
undefined_name == none
undefined_name == other_undefined
'b' in 'abc'
'z' not in 'abc'
1 in [1, 2]
'a' in {'a': 1}
1 in undefined_name
1 in none
1 in 5
not 1 in [2]
true and 'x' or 'y'
'' or [] or 'last'
none and 1
not not 1
'yes' if 1 else 'no'
'yes' if 0
('yes' if 0) is defined
1 if 0 else 2 if 0 else 3
'ab' * 3
3 * 'ab'
'ab' * -1
[1] * 2
[1, 2] + [3]
(1,) + (2, 3)
[1] + (2,)
'a' + 1
1 + none
'a' + undefined_name
undefined_name.attribute
undefined_name['item']
none.attribute
none['item']
none[0]
'abc'.attribute
messages[0].role
messages[0]['role']
messages[-1].content
messages[5]
messages[5].role
messages.0.role
messages[0].nothing
messages[0]['nothing'] is defined
'abc'[0]
'abc'[-1]
'abc'[7]
'héllo'[1]
'abc'['x']
[1, 2, 3][true]
{'a': 1, 1: 'one', none: 0}[1]
{'a': {'b': [10, 20]}}.a.b[1]
(1, 2, 3)[1]
'abcdef'[1:3]
'abcdef'[:-1]
'abcdef'[-3:]
'abcdef'[::-1]
'abcdef'[::2]
'abcdef'[4:1:-1]
'abcdef'[10:]
'héllo wörld'[1:8]
'abc'[2:1]
[1, 2, 3, 4][1:]
[1, 2, 3, 4][::-1]
[1, 2, 3, 4][-2:]
[1, 2, 3, 4][:-2:-1]
[1, 2, 3, 4][5:0:-2]
[1, 2][0:9]
(1, 2, 3)[:2]
[1, 2][::0]
'%s %s' % ('a',)
'%d' % 'a'
'{} {}'.format('a', 1)
'{1} {0}'.format('a', 'b')
'{name}!'.format(name='x')
'{:>5}|{:<5}|{:^5}|{:05d}|{:.2f}'.format('a', 'b', 'c', 42, 2.5)
'{:,}'.format(1234567)
'a' 'b'
'tab\\tnew\\nline\\\\ \\' \\" \\x41 \\u00e9 \\d'
"it's"
'{{ not a tag }} {% nor this %}'
(1, 2)
(1,)
()
[1, 'two', 3.0, none, true, [], {}]
{'a': 1, 'b': [1, {'c': 'd'}]}
{'quote': "it's", 'double': '"', 'both': '\\'"'}
{'a': 1, 'b': 2}.keys() | list
{'a': 1}.values() | list
{'a': 1}.get('a')
{'a': 1}.get('b')
{'a': 1}.get('b', 'default')
{'a': 1}.get('b', default=2)
{'items': 1}.items is defined
{'a': 1}.nothing is defined
{'a': 1}.pop('a')
{'a': 1}.update({'b': 2})
[1].append(2)
[1, 2, 1].count(1)
[1, 2, 1].index(2)
[1, 2].index(3)
[3, 1].sort()
'x'.nothing()
none.split(',')
undefined_name.split(',')
undefined_name()
'a'()
messages()
dict(a=1, b='c')
dict({'x': 0}, y=1)
range(3) | list
range(1, 7, 2) | list
range(3, 0, -1) | list
range(5) | last
range(1000000) | length
range('a')
namespace(a=1).a
namespace().b is defined
strftime_now('%d %b %Y')
strftime_now("%A %-d %B, %H:%M:%S")
raise_exception('no ' ~ 1)
nothing_defined('x')
'x' | nothing_defined
'x' is nothing_defined
""".strip().split("\n")

METHODS = """
'  ab '.strip() ~ '|'
'  ab '.lstrip() ~ '|'
'  ab '.rstrip() ~ '|'
'xxabxx'.strip('x')
'xyabyx'.lstrip('xy')
'ab\\n\\n'.rstrip('\\n') ~ '|'
'\\u00a0a\\u2003'.strip() ~ '|'
' a  b '.split()
'a,b,,c'.split(',')
'a,b,c'.split(',', 1)
'a b c'.split(maxsplit=1)
' a b  c '.split(none, 1)
'a,b,c'.rsplit(',', 1)
' a b  c '.rsplit(none, 1)
'a,b'.split(sep=',')
''.split()
''.split(',')
'a-b-c'.partition('-')
'a-b-c'.rpartition('-')
'abc'.partition('-')
'a\\nb\\r\\nc\\n'.splitlines()
'a\\nb'.splitlines(true)
'aXbX'.replace('X', '-')
'aXbX'.replace('X', '-', 1)
'abc'.replace('', '-')
'abc'.startswith('ab')
'abc'.startswith(('x', 'a'))
'abc'.endswith('bc')
'abc'.startswith(1)
'Hello World'.upper()
'Hello World'.lower()
'hello wORLD'.capitalize()
'straße'.upper()
'abc'.find('c')
'abc'.find('z')
'abcabc'.rfind('b')
'héllo'.index('l')
'abc'.index('z')
'banana'.count('an')
'-'.join(['a', 'b'])
'-'.join('abc')
', '.join({'k': 1, 'l': 2})
'abc'.removeprefix('a')
'abc'.removesuffix('bc')
'abc'.isalpha()
'ab1'.isalnum()
'12'.isdigit()
'a b'.isspace()
' '.isspace()
'abc'.islower()
'ABC'.isupper()
''.isdigit()
'x'.strip(1)
'x'.format()
""".strip().split("\n")

FILTERS = """
'  x '|trim ~ '|'
'xxaxx'|trim('x')
5|trim
none|trim
undefined_name|trim ~ '|'
'abc'|length
'héé'|length
[1, 2]|length
{'a': 1}|count
undefined_name|length
none|length
5|length
'a'|upper
none|upper
'HeLLo'|lower
'hello there'|title
"it's o'neil-smith (foo)"|title
'hELLO'|capitalize
'abcabc'|replace('b', 'X')
'abcabc'|replace('b', 'X', 1)
5|replace(5, 6)
[1, 2, 3]|join
[1, 2, 3]|join(', ')
[1, none, true, 'x', 1.5]|join('-')
'abc'|join('.')
messages|join(',', attribute='role')
undefined_name|join(',')
{'a': 1, 'b': 2}|join(',')
undefined_name|default('d')
none|default('d')
none|default('d', true)
''|default('d', boolean=true)
undefined_name|d
false|default(1)
[3, 1, 2]|sort
['b', 'A', 'c']|sort
['b', 'A', 'c']|sort(case_sensitive=true)
[3, 1, 2]|sort(reverse=true)
messages|sort(attribute='content')|map(attribute='content')|list
{'b': 1, 'A': 2}|dictsort
{'b': 1, 'a': 2}|dictsort(by='value')
{'b': 1, 'a': 2}|dictsort(reverse=true)
[1]|dictsort
{'a': 1}|items|list
undefined_name|items|list
none|items|list
'abc'|list
{'a': 1}|list
undefined_name|list
[1, 2, 3]|first
[]|first is defined
'abc'|first
[1, 2, 3]|last
'abc'|last
[]|last is defined
undefined_name|first is defined
[1, 2, 3]|reverse|list
'abc'|reverse
messages|map(attribute='role')|list
messages|map(attribute='nothing', default='x')|list
['a', 'b']|map('upper')|list
['a,b', 'c']|map('replace', ',', ';')|join
[{'a': {'b': 1}}]|map(attribute='a.b')|list
[[1, 2], [3, 4]]|map(attribute=1)|list
none|map('upper')|list
messages|selectattr('role', 'equalto', 'user')|list|length
messages|selectattr('role', '==', 'user')|map(attribute='content')|join
messages|selectattr('role', 'in', ['user', 'system'])|list|length
messages|rejectattr('role', 'equalto', 'user')|map(attribute='role')|list
messages|selectattr('tool_calls', 'defined')|list|length
messages|selectattr('content')|list|length
[1, 2, 3, 4]|select('odd')|list
[1, 2, 3, 4]|select('greaterthan', 2)|list
[0, 1, '', 'a', none]|select|list
[0, 1, '', 'a', none]|reject|list
[1, 2, 3, 4]|reject('even')|list
[1, 2, 3, 4]|select('divisibleby', 3)|list
['a', 1]|select('string')|list
[1, 2]|select('odd')|first
[1, 1, 2]|unique|list
['a', 'A', 'b']|unique|list
[1, 2, 3]|sum
[]|sum
[1, 3, 2]|max
[1, 3, 2]|min
['b', 'A']|min
[]|max is defined
[1, 2, 3, 4, 5]|batch(2)|list
[1, 2, 3]|batch(2, 'x')|list
[1, 2, 3, 4, 5]|slice(2)|list
[1, 2, 3]|slice(2, 'x')|list
messages|groupby('role')|list|length
'12'|int
'12.7'|int
'x'|int
'x'|int(5)
'ff'|int(base=16)
' 7 '|int
none|int
2.9|int
true|int
'1.5'|float
'x'|float
'x'|float(2.5)
3|float
2.5|round
3.5|round
2.567|round(2)
2.1|round(method='ceil')
2.9|round(0, 'floor')
5|round
-5|abs
-5.5|abs
'x'|abs
none|string
true|string
1.0|string
[1, 'a']|string
{'a': none}|string
'<b>'|e
'<b>'|safe
('<b>'|safe) ~ '<i>'
'a\\nb\\n\\nc'|indent
'a\\nb'|indent(2)
'a\\nb'|indent(2, true)
'a\\n\\nb'|indent(2, blank=true)
''|indent ~ '|'
'%s-%s'|format('a', 'b')
'x'|attr('y') is defined
'{"a": 1}'|tojson
'é "q" \\\\ / \\n\\t\\x01\\x7f</script>'|tojson
[1, 2.0, true, none, 'x', 1e100, -0.5]|tojson
{'b': 1, 'a': {'c': []}}|tojson
{'b': 1, 'a': {'c': [], 'd': [1, {'e': {}}]}}|tojson(indent=2)
[1, [2]]|tojson(indent=4)
{'b': 1, 'a': 2}|tojson(sort_keys=true)
{'a': [1, 2]}|tojson(separators=(',', ':'))
{'a': 'é😀'}|tojson(ensure_ascii=true)
{1: 2, none: 3, true: 4, 1.5: 5}|tojson
(1, 2)|tojson
undefined_name|tojson
{'a': undefined_name}|tojson
[]|tojson(indent=2)
{}|tojson(indent=2)
messages|tojson
tools|tojson
{'a': 1}.items()|list|tojson
range(3)|list|tojson
""".strip().split("\n")

TESTS = """
1 is number
true is number
'1' is number
1 is integer
true is integer
1.0 is integer
1.0 is float
1 is float
true is boolean
1 is boolean
true is true
1 is true
false is false
none is none
undefined_name is none
undefined_name is undefined
x is defined
'a' is string
1 is string
{} is mapping
[] is mapping
'a' is mapping
[] is sequence
() is sequence
'a' is sequence
{} is sequence
1 is sequence
none is sequence
undefined_name is sequence
[] is iterable
'a' is iterable
{} is iterable
1 is iterable
none is iterable
undefined_name is iterable
{}.items() is iterable
[1]|map('string') is iterable
3 is odd
3 is even
4 is divisibleby 2
4 is divisibleby(3)
1 is eq 1
1 is ne(2)
2 is gt 1
2 is lessthan 1
1 is in [1, 2]
'a' is in 'abc'
'abc' is lower
'ABC' is upper
1 is sameas 1
none is sameas none
'upper' is filter
'nothing' is filter
'defined' is test
1 is not defined
1 is not string and true
not 1 is string
'a' is string and 'b' is string
1 is defined if true else 2
messages is iterable and messages is not string
messages[0].content is string
messages[0].nothing is defined and messages[0].nothing is not none
""".strip().split("\n")

# Whole templates: statements, scopes and whitespace. `ª` marks nothing; line breaks matter.
STATEMENTS = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.index0 }}/{{ loop.revindex }}/{{ loop.revindex0 }}/{{ loop.length }}/{{ loop.first }}/{{ loop.last }};{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined }}<{{ m.role }}>{{ loop.nextitem.role if loop.nextitem is defined }} {% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{{ loop.last }}{% else %}none{% endfor %}",
    "{% for m in [] %}x{% else %}empty{% endfor %}",
    "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }}{{ ',' if not loop.last }}{% endfor %}",
    "{% for k in {'a': 1, 'b': 2} %}{{ k }}{{ loop.length }}{% endfor %}",
    "{% for c in 'héy' %}{{ c }}.{% endfor %}",
    "{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% for a, b in [(1, 2, 3)] %}{{ a }}{% endfor %}",
    "{% for x in 5 %}x{% endfor %}",
    "{% for x in undefined_name %}x{% else %}nothing{% endfor %}",
    "{% for m in messages|selectattr('role', 'ne', 'system') %}{{ loop.last }}{{ loop.length }} {% endfor %}",
    "{% for m in messages[1:] %}{{ m.role }}{% endfor %}",
    "{% for m in messages[::-1] %}{{ m.role }}{{ loop.last }} {% endfor %}",
    "{% for x in [1, 2] %}{% for y in [3, 4] %}{{ loop.index }}{{ x }}{{ y }} {% endfor %}{{ loop.index }}{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}@{{ loop.depth }}{% endif %}{% endfor %}",
    "{% for x in [1, 1, 2] %}{{ loop.changed(x) }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for x in [1] %}{{ loop.cycle() }}{% endfor %}",
    "{% set x = 1 %}{% for i in [1, 2, 3] %}{{ x }}{% set x = x + 1 %}{{ x }}{% endfor %}|{{ x }}",
    "{% for i in [1, 2] %}{% if i == 2 %}{{ y is defined }}{% endif %}{% set y = i %}{% endfor %}{{ y is defined }}",
    "{% set ns = namespace(n=0, last=none) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.last = m.role %}{% endfor %}{{ ns.n }}{{ ns.last }}{{ ns.nothing is defined }}",
    "{% set ns = namespace({'a': 1}) %}{{ ns.a }}{% set ns.items = [1] %}{{ ns.items }}{{ ns['items'] }}",
    "{% set d = {'a': 1} %}{% set d.a = 2 %}{{ d.a }}",
    "{% if true %}{% set x = 1 %}{% endif %}{{ x }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    "{% set (a, b) = (1, 2) %}{{ b }}{{ a }}",
    "{% set x %}  block {{ 1 + 1 }} {% endset %}[{{ x }}]",
    "{% set x | upper | trim %} block {% endset %}[{{ x }}]",
    "{% set x = ['a'] + ['b'] %}{{ x }}{{ x is sequence }}{{ x[1] }}{{ x|length }}",
    "{% macro f(a, b='d', c=none) %}{{ a }}-{{ b }}-{{ c }};{% endmacro %}{{ f(1) }}{{ f(1, 2) }}{{ f(1, c=3) }}{{ f(b=2, a=1) }}{{ f() }}",
    "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}",
    "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(b=2) }}",
    "{% macro f() %}{{ x }}{% endmacro %}{% set x = 1 %}{{ f() }}",
    "{% set x = 1 %}{% macro f() %}{{ x }}{% set x = 2 %}{{ x }}{% endmacro %}{{ f() }}{{ x }}",
    "{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
    "{% macro f(n) %}{% if n > 0 %}f{{ g(n - 1) }}{% endif %}{% endmacro %}{% macro g(n) %}{% if n > 0 %}g{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "{% macro f(x) %}  {{ x }}  {% endmacro %}[{{ f(1) | trim }}]{% set y = f(2) %}[{{ y }}]{{ f(3) is string }}",
    "{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}inside{% endcall %}",
    "{% macro f() %}<{{ caller('v') }}>{% endmacro %}{% call(x) f() %}got {{ x }}{% endcall %}",
    "{% macro f(messages) %}{% for m in messages %}{{ m.role }}{% endfor %}{% endmacro %}{{ f(messages) }}{{ f([]) }}",
    "{% macro f() %}{{ bos_token }}{{ messages|length }}{% endmacro %}{{ f() }}",
    "{% set ns = namespace(x=0) %}{% macro f() %}{% set ns.x = ns.x + 1 %}{{ ns.x }}{% endmacro %}{{ f() }}{{ f() }}{{ ns.x }}",
    "{% filter upper %}a{{ 'b' }}{% endfilter %}",
    "{% filter replace('a', 'b')|upper %}banana{% endfilter %}",
    "{% with a=1, b=2 %}{{ a }}{{ b }}{% endwith %}{{ a is defined }}",
    "{% with %}{% set z = 1 %}{{ z }}{% endwith %}{{ z is defined }}",
    "{% generation %}said {{ 1 }}{% endgeneration %}",
    "{% for m in messages %}{%- generation -%}  {{ m.role }}  {%- endgeneration -%}{% endfor %}",
    "{% raw %}{{ raw }} {% if %}{% endraw %}",
    "a {%- raw -%}  x  {%- endraw -%} b",
    "a {# comment {{ x }} #} b",
    "a {#- comment -#} b",
    "{# c #}\nline\n  {# c #}\nend",
    "{% if false %}1{% elif none %}2{% elif 0 %}3{% else %}4{% endif %}",
    "{% if messages and messages[0].role == 'system' %}s{% else %}n{% endif %}",
    "{% if not undefined_name %}u{% endif %}",
    "{% if undefined_name.x %}u{% endif %}",
    "a\n{% if true %}\nb\n{% endif %}\nc\n",
    "a\n  {% if true %}  \n  b\n  {% endif %}\nc",
    "a\n  {%- if true -%}  \n  b\n  {%- endif -%}\nc",
    "a\n  {%+ if true +%}  \n  b\n  {%+ endif +%}\nc",
    "a  {{ 1 }}  b\n{{ 2 }}\nc",
    "a  {{- 1 -}}  b\n{{- 2 -}}\nc",
    "  {{ 1 }}\n\t{% if 1 %}x{% endif %}\n",
    "{% if 1 %}{% if 1 %}\n  x\n{% endif %}{% endif %}",
    "x{% set a = 1 %}\ny\n{% set b = 2 %}\n\nz",
    "x  {% set a = 1 %}\n  y",
    "trailing\n",
    "trailing\n\n",
    "crlf\r\n{% if 1 %}\r\nx\r\n{% endif %}\r\nend\r\n",
    "{{ 'a\nb' }}",
    "{{ {'a': {'b': {}}} }}",
    "{{'x'}}{{-1}}{{ -1 }}",
    "{{ messages\n  | length\n}}",
    "{% for m in messages -%}\n  {{ m.role }}\n{%- endfor %}",
    "{{ '}}' }}{{ '%}' }}{{ \"{{\" }}",
    "{ {% if 1 %}{{% endif %} }",
    "{{{'a': 1}['a']}}",
    "unclosed {{ 1",
    "unclosed {% if 1 %}",
    "{% endif %}",
    "{% unknown %}",
    "{{ 1 + }}",
    "{{ (1 }}",
    "{{ 'open }}",
    "{{ }}",
    "{% for %}{% endfor %}",
    "{% break %}",
    "{% include 'x' %}",
    "{% set none = 1 %}",
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% endif %}{{ loop_messages|length }}{{ system }}",
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate: ' + m['role']) }}{% endif %}{% endfor %}",
    "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ sep_token is defined }}",
    "{{ tools is none }}{{ tools is defined }}{{ documents is none }}{{ add_generation_prompt }}{{ enable_thinking is defined }}",
    "{% set content = messages[-1].content %}{% if '</think>' in content %}{{ content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ content }}{% endif %}",
    "{%- for m in messages %}{%- set ns = namespace(found=false) %}{%- if m.role == 'user' %}{%- set ns.found = true %}{%- endif %}{{- ns.found }}{%- endfor %}",
    "{% set x = {'type': 'object', 'properties': {'a': {'type': ['string', 'null']}}} %}{% for name, p in x.properties.items() %}{{ name }}: {{ p.type | join('|') if p.type is iterable and p.type is not string else p.type }}{% endfor %}",
    "{% set parts = [] %}{% for m in messages %}{% set parts = parts + [m.role] %}{% endfor %}{{ parts }}",
    "{% set ns = namespace(parts=[]) %}{% for m in messages %}{% set ns.parts = ns.parts + [m.role] %}{% endfor %}{{ ns.parts | join(' > ') }}",
]


def templates():
    for expression in EXPRESSIONS + METHODS + FILTERS + TESTS:
        yield "{{ " + expression + " }}", "system and history, prompt"
    for statement in STATEMENTS:
        yield statement, "system and history, prompt"
