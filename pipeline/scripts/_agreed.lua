-- the run's config, nil before the trainer has written it
local function agreed()
  local text = redis.call('GET', config)
  return text and cjson.decode(text)
end
